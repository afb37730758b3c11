// A recorded run without a kernel: holds what app/export.py packed and speaks the kernel's messages. Pure: no DOM.
import { u32, ROW, SAME_BLOCKS } from "./store.js";
const FIELDS = ROW - 2;
const EVERY = 64;
const MOST_FOLDS = 200;
const WINDOW = 4;
const EXPLAIN_MS = 250;
const STATE_PARTS = new Set(["words", "blocks", "rows", "marks", "queue", "chunks"]);

export async function unpack(base64) {
  return new Uint8Array(
    await new Response(
      new Blob([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))])
        .stream()
        .pipeThrough(new DecompressionStream("gzip")),
    ).arrayBuffer(),
  );
}

// The state at a cursor, folded from the strip of changes. Its format is told in app/export.py.
export class Fold {
  constructor(bytes) {
    const n = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    this.head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + n)));
    this.buf = {};
    let o = 4 + n;
    for (const [name, size] of this.head.buffers) {
      o = (o + 7) & ~7;
      this.buf[name] = new DataView(bytes.buffer, bytes.byteOffset + o, size);
      o += size;
    }
    const b = this.buf.strip;
    this.strip = new Uint8Array(b.buffer, b.byteOffset, b.byteLength);
    this.offsets = u32(this.buf.offsets);
    this.said = new Uint8Array(this.buf.said.buffer, this.buf.said.byteOffset, this.buf.said.byteLength);
    this.saidAt = u32(this.buf.saidat);
    this.steps = this.head.first.steps;
    this.every = Math.max(EVERY, Math.ceil(this.steps / 200));
    Object.assign(this, {
      step: 0,
      event: null,
      rows: [],
      words: u32(this.buf.words).slice(),
      waiting: [],
      running: [],
      chunks: [],
      pad: 0,
      config: this.head.first.config,
      touched: new Set(),
      changed: new Set(),
      tables: new Set(),
      marks: new Set(),
      queued: true,
    });
    this.kept = new Map();
    this.keep();
  }
  keep() {
    if (!this.kept.has(this.step)) {
      this.kept.set(this.step, {
        step: this.step,
        rows: this.rows.map((q) => q && { f: q.f.slice(), blocks: q.blocks }),
        words: this.words.slice(),
        waiting: this.waiting,
        running: this.running,
        config: this.config,
        chunks: this.chunks,
        pad: this.pad,
        marks: this.marks,
      });
    }
  }
  back(step) {
    const k = this.kept.get(step);
    Object.assign(this, {
      ...k,
      event: null,
      rows: k.rows.map((q) => q && { f: q.f.slice(), blocks: q.blocks }),
      words: k.words.slice(),
    });
    this.clear();
  }
  clear() {
    this.touched.clear();
    this.changed.clear();
    this.tables.clear();
    this.queued = false;
  }
  num(bytes = this.strip) {
    let v = 0;
    let m = 1;
    let b;
    do {
      b = bytes[this.at++];
      v += (b & 127) * m;
      m *= 128;
    } while (b & 128);
    return v;
  }
  diff(bytes) {
    const v = this.num(bytes);
    return v & 1 ? -(v + 1) / 2 : v / 2;
  }
  splice(old) {
    const front = this.num();
    const back = this.num();
    const n = this.num();
    const v = old.slice(0, front);
    for (let i = 0; i < n; i++) v.push(this.num());
    for (let i = old.length - back; i < old.length; i++) v.push(old[i]);
    return v;
  }
  // The sentences of a step, and those of its events.
  sentences(step) {
    const b = this.said;
    const { frames, ids } = this.head.said;
    const last = new Map();
    this.at = this.saidAt[step];
    let id = 0;
    return [0, 1].map(() =>
      Array.from({ length: this.num(b) }, () => {
        const k = this.num(b);
        const [kind, first, ...rest] = frames[k];
        const old = last.get(k);
        const numbers = rest.map((_, i) => this.diff(b) + (old ? old[i] : 0));
        last.set(k, numbers);
        return {
          kind,
          text: first + rest.map((t, i) => numbers[i] + t).join(""),
          ids: Array.from({ length: this.num(b) }, () => ids[(id += this.diff(b))]),
        };
      }),
    );
  }
  // Where the step's tokens and slots were; with `whole`, the run up to it too.
  account(step, whole) {
    const a = this.head.accounts;
    if (a.missing) return { type: "account", step, missing: a.missing };
    const n = a.tokens.length;
    const m = n + a.slots.length;
    const row = a.rows[step - 1];
    const named = (names, v) => names.map((p, i) => [p, v[i]]);
    const out = {
      type: "account",
      step,
      tokens: named(a.tokens, row),
      slots: named(a.slots, row.slice(n, m)),
      at_event: row[m],
    };
    if (!whole) return out;
    const sums = new Array(m).fill(0);
    for (let s = 0; s < step; s++) for (let i = 0; i < m; i++) sums[i] += a.rows[s][i];
    return {
      ...out,
      run: { steps: step, tokens: named(a.tokens, sums), slots: named(a.slots, sums.slice(n)) },
      reservation: a.reservation,
    };
  }
  // Of a mixture: tokens of each expert in the step, and in all up to it.
  experts(step) {
    const x = this.head.experts;
    const row = x && step ? x.rows[step - 1] : null;
    if (!row) return null;
    if (!this.load || this.load.step > step) this.load = { step: 0, sums: new Array(row.length).fill(0) };
    const { sums } = this.load;
    for (; this.load.step < step; this.load.step++) {
      const r = x.rows[this.load.step];
      if (r) for (let i = 0; i < r.length; i++) sums[i] += r[i];
    } // played on, a step costs its own row
    const rows = (v) => x.layers.map((_, k) => v.slice(k * x.num, (k + 1) * x.num));
    return { layers: x.layers, load: rows(row), sum: rows(sums) };
  }
  events(step) {
    this.at = this.offsets[step - 1];
    return this.num() - 1;
  }
  // Moves to `step`, inside it after `event` events. Says whether it went straight on, so that `changed`, `touched`, `tables` and `queued` tell what is new.
  go(step, event) {
    const base = event === null ? step : step - 1;
    const on = this.event === null && event === null && step >= this.step && step - this.step <= MOST_FOLDS;
    if (!on) {
      let from = base - (base % this.every);
      while (!this.kept.has(from)) from -= this.every;
      if (this.event !== null || this.step > base || this.step < from) this.back(from);
    }
    while (this.step < base) this.next(null);
    if (event !== null) this.next(event);
    return on;
  }
  next(upto) {
    const n = this.events(this.step + 1);
    this.pad = this.num();
    this.chunks = [];
    for (let k = 4 * this.num(); k; k--) this.chunks.push(this.num());
    this.marks = new Set();
    for (let i = 0; i <= n && !(upto !== null && i >= upto); i++) this.tick();
    this.step++;
    this.event = upto;
    if (upto === null && this.step % this.every === 0) this.keep();
  }
  tick() {
    const w = this.num();
    for (let k = Math.floor(w / 8); k; k--) {
      const r = this.num();
      const mask = this.num();
      while (this.rows.length <= r) this.rows.push(null);
      const q = this.rows[r] || (this.rows[r] = { f: new Array(FIELDS).fill(0), blocks: [] });
      for (let i = 0; i < FIELDS; i++) if (mask & (1 << i)) q.f[i] += this.diff();
      const old = q.blocks;
      q.blocks = this.splice(old);
      if (q.blocks.length !== old.length || q.blocks.some((b, i) => b !== old[i])) this.tables.add(r);
      this.changed.add(r);
    }
    if (w & 1) {
      let id = 0;
      for (let k = this.num(); k; k--) {
        id += this.diff();
        this.words[2 * id] = this.num();
        this.words[2 * id + 1] = this.num() * 65536 + this.num();
        this.touched.add(id);
        this.marks.add(id);
      }
    }
    if (w & 2) {
      this.waiting = this.splice(this.waiting);
      this.running = this.splice(this.running);
      this.queued = true;
    }
    if (w & 4) this.config = this.head.configs[this.num()];
  }
  // The parts of a picture: all of the state, or what changed since they were last asked for.
  parts(full) {
    const rows = [];
    for (const r of full ? this.rows.keys() : [...this.changed].sort((a, b) => a - b)) {
      const q = this.rows[r];
      if (q) {
        rows.push(r, ...q.f);
        if (full || this.tables.has(r)) rows.push(q.blocks.length, ...q.blocks);
        else rows.push(SAME_BLOCKS);
      }
    }
    const p = {};
    if (rows.length) p.rows = Uint32Array.from(rows);
    if (full) {
      p.words = this.words.slice();
    } else if (this.touched.size) {
      p.blocks = Uint32Array.from(
        [...this.touched].flatMap((b) => [b, this.words[2 * b], this.words[2 * b + 1]]),
      );
    }
    if (full || this.queued) {
      p.queue = Uint32Array.from([this.waiting.length, ...this.waiting, ...this.running]);
    }
    p.marks = Uint32Array.from([...this.marks].filter((b) => b).sort((a, b) => a - b));
    p.chunks = Uint32Array.from(this.chunks);
    this.clear();
    return p;
  }
}

// The kernel's side of the page: the anywidget model interface, and what app/player.py does with a recording.
export class Recorded {
  constructor(fold, step = fold.head.step) {
    Object.assign(this, {
      fold,
      start: Math.max(0, Math.min(fold.steps, step)),
      listeners: new Set(),
      playing: false,
      speed: 10,
      sent: 0,
      acked: 0,
      timer: 0,
      explained: 0,
      accounting: false,
    });
  }
  on(event, f) {
    if (event === "msg:custom") this.listeners.add(f);
  }
  off(event, f) {
    this.listeners.delete(f);
  }
  get() {
    return undefined;
  }
  emit(m, bufs = []) {
    for (const f of this.listeners) f(m, bufs);
  }
  live(more = {}) {
    return {
      loading: null,
      progress: -1,
      open: true,
      playing: this.playing,
      speed: this.speed,
      num_requests: this.fold.head.num_requests,
      title: this.fold.head.title,
      recording: "it is a page",
      banner: null,
      bad: false,
      offer: null,
      ...more,
    };
  }
  tell(more) {
    this.emit({ type: "live", live: this.live(more) });
  }
  send(m) {
    if (m.type === "ready") {
      this.sent = this.acked = 0;
      this.tell();
      this.fold.go(this.start, null);
      this.picture(true, true);
      this.say();
    } else if (m.type === "ack") {
      this.acked = Math.max(this.acked, m.seq);
    } else if (m.type === "cmd") {
      this.command(m);
    }
  }
  command(m) {
    const { step, event, steps } = this.fold;
    if (m.cmd === "seek") {
      this.seek(m.step);
    } else if (m.cmd === "reset") {
      this.seek(0);
    } else if (m.cmd === "back") {
      this.seek(event === null ? step - 1 : step);
    } else if (m.cmd === "end") {
      this.seek(steps);
    } else if (m.cmd === "step") {
      this.pause();
      if (event === null && step === steps) {
        this.tell({ banner: "This is a recording, and this was its last step." });
      } else {
        this.go(event === null ? step + 1 : step, null);
      }
    } else if (m.cmd === "event") {
      this.oneEvent(m.by > 0);
    } else if (m.cmd === "speed") {
      this.speed = Math.max(0, m.value);
      this.tell();
    } else if (m.cmd === "account") {
      this.accounting = !!m.on;
      this.say();
    } else if (m.cmd === "pause") {
      this.pause();
    } else if (m.cmd === "play" && !this.playing) {
      this.playing = true;
      this.tell();
      if (step === steps) this.go(0, null);
      this.timer = setTimeout(() => this.beat(), this.speed ? 1000 / this.speed : 0);
    }
  }
  seek(step) {
    this.pause();
    this.go(Math.max(0, Math.min(this.fold.steps, step)), null);
  }
  oneEvent(on) {
    // inside step N the cursor is (N, k), k events of it done; all of them done is (N, null)
    this.pause();
    let { step, event } = this.fold;
    const { steps } = this.fold;
    if (on) {
      if (event === null) {
        if (step >= steps) return;
        step++;
        event = 0;
      }
      event++;
    } else {
      if (event === null) {
        if (!step) return;
        event = this.fold.events(step);
      }
      event--;
    }
    const n = this.fold.events(step);
    if (event > 0 && event < n) this.go(step, event);
    else this.go(event >= n ? step : step - 1, null);
  }
  beat() {
    if (!this.playing) return;
    const { step, event, steps } = this.fold;
    if (this.sent - this.acked < WINDOW) {
      if (event === null && step === steps) return this.pause();
      this.go(event === null ? step + 1 : step, null);
    } // a page that is behind is waited for
    this.timer = setTimeout(() => this.beat(), this.speed ? 1000 / this.speed : 0);
  }
  pause() {
    clearTimeout(this.timer);
    if (!this.playing) return;
    this.playing = false;
    this.tell();
    this.say();
  }
  go(step, event) {
    const on = this.fold.go(step, event);
    this.picture(!on);
    if (!this.playing || Date.now() - this.explained > EXPLAIN_MS) this.say();
  }
  picture(full, reset = false) {
    const { head, buf, step, event, steps, pad, config } = this.fold;
    const parts = this.fold.parts(full);
    let m = { type: "picture", steps, step, event, pad, config, copies: (head.copies || {})[step] };
    if (reset) {
      const { b, words, ...first } = head.first;
      m = { ...first, ...m, words, live: this.live() };
      for (const n of b) if (!STATE_PARTS.has(n)) parts[n] = buf[n];
    }
    const experts = this.fold.experts(step);
    if (experts) m.experts = experts;
    if (full) m.full = true;
    m.b = Object.keys(parts);
    m.seq = ++this.sent;
    this.emit(
      m,
      Object.values(parts).map((p) => (p instanceof DataView ? p : new DataView(p.buffer))),
    );
  }
  // Sentences of the step that is shown, and the figures up to it (inside a step: up to the one before; of a long run: up to the last that has them).
  say() {
    this.explained = Date.now();
    const { head, buf, step, event } = this.fold;
    const [items, events] = this.fold.sentences(step);
    this.emit({
      type: "why",
      step,
      event,
      items,
      num_events: events.length,
      watched: [],
      ...(event ? { moment: events[event - 1] } : {}),
    });
    this.emit(
      head.inside[step] || { type: "inside", step, watched: head.watched, device: [], profile: null },
    );
    if (this.accounting && step) this.emit(this.fold.account(step, !this.playing));
    const { names, at, clock } = head.figures;
    const upto = event === null ? step : step - 1;
    let i = at.length - 1;
    while (i >= 0 && at[i] > upto) i--;
    if (i >= 0) {
      const values = {};
      names.forEach((n, k) => {
        const v = buf.figures.getFloat64(8 * (k * at.length + i), true);
        if (!Number.isNaN(v)) values[n] = v;
      });
      this.emit({ type: "metrics", steps: at[i], clock, values });
    }
  }
}
