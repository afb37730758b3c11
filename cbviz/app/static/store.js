// What the page holds, decoded from the kernel's messages. Pure: no DOM.
//   history   grows with the recording: requests, segments of the timeline, output words, one row of figures a step
//   state     belongs to the cursor: a row a request, two words a block, the queues, the batch of the step
import { isolated } from "./texts.js";
export const u32 = (b) =>
  b.byteOffset & 3
    ? new Uint32Array(b.buffer.slice(b.byteOffset, b.byteOffset + b.byteLength))
    : new Uint32Array(b.buffer, b.byteOffset, b.byteLength >> 2);
export const f64 = (b) => new Float64Array(b.buffer.slice(b.byteOffset, b.byteOffset + b.byteLength));
const NO_SEGMENTS = new Uint32Array(0);

// Run-length segments a request: one word each, step * 32 + state. Steps < 2^27, 32 states. Step s covers [s - .5, s + .5]; the first is 1.
export class Timeline {
  constructor(n = 0) {
    this.n = 0;
    this.rows = [];
    this.len = [];
    this.t = 1;
    this.nseg = 0;
    this.grow(n);
  }
  static fromCSR(ptr, seg, t) {
    // rows are views into one buffer: no copy a row
    const s = new Timeline(ptr.length - 1);
    for (let i = 0; i < s.n; i++) {
      s.rows[i] = seg.subarray(ptr[i], ptr[i + 1]);
      s.len[i] = ptr[i + 1] - ptr[i];
    }
    s.t = t;
    s.nseg = ptr[s.n];
    return s;
  }
  grow(n) {
    while (this.n < n) {
      this.rows.push(NO_SEGMENTS);
      this.len.push(0);
      this.n++;
    }
  }
  push(r, step, state) {
    this.grow(r + 1);
    let a = this.rows[r];
    const n = this.len[r];
    const key = step * 32 + state;
    if (n && a[n - 1] >>> 5 >= step) {
      // sent again, or the same step corrected: the last word wins
      let i = n;
      while (i && a[i - 1] >>> 5 > step) i--;
      if (i && a[i - 1] >>> 5 === step) {
        if (a[i - 1] !== key) {
          a = this.rows[r] = a.slice();
          a[i - 1] = key;
        }
        return;
      }
    }
    if (n + 1 > a.length) {
      const b = new Uint32Array(Math.max(16, a.length * 2));
      b.set(a.subarray(0, n));
      a = this.rows[r] = b;
    }
    a[n] = key;
    this.len[r] = n + 1;
    this.nseg++;
  }
  transitions(w) {
    for (let i = 0; i + 2 < w.length; i += 3) this.push(w[i], w[i + 1], w[i + 2]);
  }
  find(r, t) {
    // index of the segment that covers step t, or -1
    const a = this.rows[r];
    const key = t * 32 + 31;
    let lo = 0;
    let hi = this.len[r];
    while (lo < hi) {
      const m = (lo + hi) >>> 1;
      if (a[m] <= key) lo = m + 1;
      else hi = m;
    }
    return lo - 1;
  }
  at(r, t) {
    if (r < 0 || r >= this.n || t < 1 || t >= this.t) return null;
    const i = this.find(r, t);
    const a = this.rows[r];
    if (i < 0) return { state: 0, start: 1, end: this.len[r] ? a[0] >>> 5 : this.t };
    return {
      state: a[i] & 31,
      start: a[i] >>> 5,
      end: i + 1 < this.len[r] ? Math.min(this.t, a[i + 1] >>> 5) : this.t,
    };
  }
}

// Two words a block: owner + 1 (32 bits, 0 = nobody ever); sharers (16) << 16 | filled slots (12) << 4 | flags (4).
export const CACHED = 1;
export const NULLBLOCK = 2;
export class Blocks {
  constructor(n, size = 16) {
    this.n = n;
    this.size = size;
    this.w = new Uint32Array(2 * n);
    this.marked = new Uint8Array(n);
    this.marks = [];
    this.dirty = null;
  } // dirty: changed since the last paint (null = all)
  owner(i) {
    return this.w[2 * i] - 1;
  }
  refs(i) {
    return this.w[2 * i + 1] >>> 16;
  }
  fill(i) {
    return (this.w[2 * i + 1] >>> 4) & 4095;
  }
  flags(i) {
    return this.w[2 * i + 1] & 15;
  }
  kind(i) {
    const q = this.w[2 * i + 1];
    const r = q >>> 16;
    return q & NULLBLOCK
      ? "null"
      : r > 1
        ? "shared"
        : r
          ? (q >>> 4) & 4095
            ? "used"
            : "reserved"
          : q & CACHED
            ? "cached"
            : "free";
  }
  static pack(refs, fill, flags) {
    return ((refs << 16) | (fill << 4) | flags) >>> 0;
  }
  set(words) {
    this.w.set(words);
    this.dirty = null;
  }
  apply(t) {
    const d = this.dirty;
    for (let i = 0; i + 2 < t.length; i += 3) {
      this.w[2 * t[i]] = t[i + 1];
      this.w[2 * t[i] + 1] = t[i + 2];
      if (d) d.add(t[i]);
    }
  }
  mark(ids) {
    const d = this.dirty;
    for (const i of this.marks) {
      this.marked[i] = 0;
      if (d) d.add(i);
    }
    for (const i of ids) {
      this.marked[i] = 1;
      if (d) d.add(i);
    }
    this.marks = ids;
  }
  counts() {
    let used = 0;
    let shared = 0;
    let reserved = 0;
    let cached = 0;
    let nul = 0;
    for (let i = 0; i < this.n; i++) {
      const q = this.w[2 * i + 1];
      const r = q >>> 16;
      if (q & NULLBLOCK) {
        nul++;
      } else if (r) {
        used++;
        if (r > 1) shared++;
        else if (!((q >>> 4) & 0xfff)) reserved++;
      } else if (q & CACHED) {
        cached++;
      }
    }
    return { used, shared, reserved, cached, free: this.n - nul - used - cached, total: this.n - nul };
  }
}

export const ROW = 13;
export const SAME_BLOCKS = 0xffffffff;
export const STATUS = ["waiting", "running", "preempted", "finished", "refused"];
export class Run {
  constructor(m) {
    Object.assign(this, {
      meta: m.meta,
      step: 0,
      event: null,
      steps: 0,
      words: [""],
      ids: [],
      index: new Map(),
      root: [],
      info: [],
      tl: new Timeline(),
      out: [],
      cols: m.series,
      series: m.series.map(() => []),
      rows: [],
      waiting: [],
      running: [],
      chunks: [],
      pad: 0,
      config: {},
    });
    this.bl = new Blocks(m.num_blocks, m.block_size);
    this.version = 0;
  }
  // First places of a table that hold attention sinks, which stay though the window has passed them.
  get sinkBlocks() {
    return this.meta.window && this.meta.sinks ? Math.ceil(this.meta.sinks / this.bl.size) : 0;
  }
  col(name) {
    return this.series[this.cols.indexOf(name)];
  }
  id(r) {
    return this.ids[r] ?? `#${r}`;
  }
  // The id as it stands inside a sentence of ours.
  name(r) {
    return isolated(this.id(r));
  }
  // One message: history first, then the state. Returns what changed.
  apply(m, buf) {
    const t = { history: false, rows: [], requests: false };
    if (m.words) this.words.push(...m.words);
    if (m.requests) {
      for (const q of m.requests) {
        const own = this.ids.length;
        this.root.push(this.index.get(q.of) ?? own);
        this.index.set(q.id, own);
        this.ids.push(q.id);
        this.info.push(q);
        this.out.push({ text: [], step: [], told: 0 });
        this.rows.push(null);
      }
      this.tl.grow(this.ids.length);
      t.requests = true;
    }
    if (buf.ptr) {
      this.tl = Timeline.fromCSR(u32(buf.ptr), u32(buf.seg), m.steps + 1);
      t.history = true;
    }
    if (buf.tr) {
      this.tl.transitions(u32(buf.tr));
      t.history = true;
    }
    if (m.out) {
      for (const [r, pieces, steps] of m.out) {
        const o = this.out[r];
        for (let i = 0; i < pieces.length; i++) {
          o.text.push(pieces[i]);
          o.step.push(steps[i]);
        }
      }
    }
    if (m.ended) for (const [r, step] of m.ended) this.out[r].told = step;
    if (m.beams) {
      for (const [step, ids, parents, pieces, scores] of m.beams) {
        const all = this.out[ids[0]].search || [];
        all.push({ step, ids, parents, pieces, scores });
        for (const r of ids) this.out[r].search = all;
      }
    }
    if (buf.series) {
      const F = f64(buf.series);
      const k = this.cols.length;
      for (let i = 0; i < F.length; i++) this.series[i % k].push(F[i]);
      t.history = true;
    }
    this.steps = m.steps;
    this.tl.t = m.steps + 1;
    this.step = m.step;
    this.event = m.event ?? null;
    if (m.full) this.rows = this.ids.map(() => null);
    if (buf.rows) {
      const w = u32(buf.rows);
      for (let i = 0; i < w.length;) {
        const r = w[i];
        const nb = w[i + 12];
        const old = this.rows[r];
        const blocks = nb === SAME_BLOCKS ? (old ? old.blocks : []) : w.slice(i + ROW, i + ROW + nb);
        this.rows[r] = {
          code: w[i + 1],
          computed: w[i + 2],
          cached: w[i + 3],
          outputs: w[i + 4],
          preemptions: w[i + 5],
          wait: this.words[w[i + 6]],
          need: w[i + 7],
          have: w[i + 8],
          end: this.words[w[i + 9]],
          status: STATUS[w[i + 10]],
          host: w[i + 11],
          blocks,
        };
        t.rows.push(r);
        i += ROW + (nb === SAME_BLOCKS ? 0 : nb);
      }
    }
    if (buf.words) this.bl.set(u32(buf.words));
    if (buf.blocks) this.bl.apply(u32(buf.blocks));
    if (buf.marks) this.bl.mark(Array.from(u32(buf.marks)));
    if (buf.queue) {
      const w = u32(buf.queue);
      this.waiting = Array.from(w.subarray(1, 1 + w[0]));
      this.running = Array.from(w.subarray(1 + w[0]));
    }
    if (buf.chunks) {
      const w = u32(buf.chunks);
      this.chunks = [];
      for (let i = 0; i < w.length; i += 4) {
        this.chunks.push({
          r: w[i],
          start: w[i + 1],
          n: w[i + 2],
          kind: w[i + 3] & 255,
          drafts: w[i + 3] >>> 8,
        });
      }
      this.pad = m.pad ?? 0;
      this.copies = m.copies ?? [];
    }
    if (m.config) this.config = m.config;
    if (m.experts) this.mixture = true;
    this.experts = m.experts || null;
    this.version++;
    return t;
  }
  // root: the request that another sequence of the same prompt belongs to (`a` for `a.1`), else the request itself.
  // Whether request r is a beam whose words are still open: they follow its lineage, and are chosen when the search ends.
  searching(r) {
    const o = this.out[r];
    const q = this.rows[r];
    return (
      !!q &&
      q.outputs > 0 &&
      !!o.search &&
      (!o.told || this.step < o.told || (this.step === o.told && q.status !== "finished"))
    );
  }
  // What a beam says so far: its words with their steps, its place by log-probability (0: the best), and the log-probability.
  beam(r) {
    const { search } = this.out[r];
    const text = [];
    const step = [];
    let n = Math.min(this.rows[r].outputs, search.length);
    const { ids, scores } = search[n - 1];
    let i = ids.indexOf(r);
    const score = scores[i];
    while (n--) {
      const s = search[n];
      text.unshift(s.pieces[i]);
      step.unshift(s.step);
      i = s.parents[i];
    }
    return { text, step, score, place: scores.filter((x) => x > score).length, of: ids.length };
  }
  // What has come and what has ended so far: requests (all sequences of one must have ended), and sequences.
  count() {
    const open = new Set();
    const come = new Set();
    let ended = 0;
    let sequences = 0;
    this.rows.forEach((q, r) => {
      if (!q) return;
      sequences++;
      come.add(this.root[r]);
      if (q.status === "finished" || q.status === "refused") ended++;
      else open.add(this.root[r]);
    });
    return { requests: come.size, done: come.size - open.size, sequences, ended };
  }
  // Requests whose table holds block i, in order of arrival.
  holders(i) {
    const v = [];
    this.rows.forEach((q, r) => {
      if (q && q.blocks.length && q.blocks.indexOf(i) >= 0) v.push(r);
    });
    return v;
  }
  // Output tokens a second over the last `k` steps up to the cursor, on the trace's own clock.
  rate(k = 20) {
    const t0 = this.col("t0");
    const t1 = this.col("t1");
    const n = this.col("sampled");
    const b = this.step;
    const a = Math.max(0, b - k);
    let tokens = 0;
    let s = 0;
    for (let i = a; i < b; i++) {
      tokens += n[i];
      s += t1[i] - t0[i];
    }
    return s > 0 ? tokens / s : NaN;
  }
}
