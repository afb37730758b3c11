// The run that the page holds, decoded from the kernel's pictures. Pure: no DOM.
//   history   grows with the recording: requests, segments of the timeline, output words, one row of figures a step
//   state     belongs to the cursor: a row a request, two words a block, the queues, the batch of the step
// @ts-check
import { isolated } from "./texts.js";
import { Timeline } from "./segments.js";
import { Blocks } from "./blocks.js";

/** @import { Buffers, ExpertLoad, Picture, RequestHead, StepConfig } from "./messages.js" */

/**
 * A request at the cursor. `code` is its state (an index of STATES); `need` and `have` go with the reason `wait`;
 * `host` counts its blocks in host memory, `outputs` its output tokens.
 * @typedef {{
 *   code: number, computed: number, cached: number, outputs: number, preemptions: number,
 *   wait: string, need: number, have: number, end: string, status: Status, host: number,
 *   blocks: Uint32Array,
 * }} Row
 *
 * A part of the step's batch. `kind` is an index of KINDS.
 * @typedef {{ row: number, start: number, tokens: number, kind: number, drafts: number }} Chunk
 *
 * One choice of a beam search: word i of beam i goes on the words of beam `parents[i]`.
 * @typedef {{ step: number, rows: number[], parents: number[], words: string[], scores: number[] }} Choosing
 *
 * The output words of a request with the step of each. `endedAt`: the step at which its beam search ended.
 * @typedef {{ words: string[], steps: number[], endedAt: number, search?: Choosing[] }} Output
 *
 * What a beam says so far. `place`: 0 is the best of `of`.
 * @typedef {{ words: string[], steps: number[], score: number, place: number, of: number }} Beam
 *
 * @typedef {"waiting" | "running" | "preempted" | "finished" | "refused"} Status
 */

/** Words of a request's row before its blocks. */
export const ROW = 13;
/** In place of the number of blocks: the table is as it was. */
export const SAME_BLOCKS = 0xffffffff;
/** @type {Status[]} */
export const STATUS = ["waiting", "running", "preempted", "finished", "refused"];

const NO_BLOCKS = new Uint32Array(0);

/**
 * The 32-bit words of a buffer; a copy only where it lies askew.
 * @param {ArrayBufferView<ArrayBuffer>} view
 */
export function wordsOf(view) {
  if (view.byteOffset & 3) {
    return new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  }
  return new Uint32Array(view.buffer, view.byteOffset, view.byteLength >> 2);
}

/** @param {ArrayBufferView<ArrayBuffer>} view */
const floatsOf = (view) =>
  new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

/**
 * The buffers of a picture, by name.
 * @param {{ b: (keyof Buffers)[] }} head
 * @param {DataView<ArrayBuffer>[]} buffers
 */
export function namedBuffers(head, buffers) {
  /** @type {Buffers} */
  const named = {};
  head.b.forEach((name, i) => {
    named[name] = buffers[i];
  });
  return named;
}

export class Run {
  /** @param {Pick<Picture, "meta" | "series" | "num_blocks" | "block_size">} head */
  constructor(head) {
    this.meta = head.meta;
    this.step = 0;
    /** @type {number | null} events done inside the step; null: all */
    this.event = null;
    /** Recorded steps. */
    this.steps = 0;

    // history
    /** Texts that rows refer to by number. */
    this.words = [""];
    /** @type {string[]} */
    this.ids = [];
    /** @type {Map<string, number>} row of an id */
    this.index = new Map();
    /** @type {number[]} row of the request that a sequence belongs to (`a` for `a.1`), else its own */
    this.root = [];
    /** @type {RequestHead[]} */
    this.requests = [];
    this.timeline = new Timeline();
    /** @type {Output[]} */
    this.outputs = [];
    this.columns = head.series;
    /** @type {number[][]} */
    this.series = head.series.map(() => []);

    // state
    /** @type {(Row | null)[]} null: not arrived at the cursor */
    this.rows = [];
    this.blocks = new Blocks(head.num_blocks, head.block_size);
    /** @type {number[]} */
    this.waiting = [];
    /** @type {number[]} */
    this.running = [];
    /** @type {Chunk[]} */
    this.chunks = [];
    /** Padding tokens of the batch. */
    this.pad = 0;
    /** @type {[number, number][]} */
    this.copies = [];
    /** @type {StepConfig} */
    this.config = {};
    /** @type {ExpertLoad | null} */
    this.experts = null;
    /** The model is a mixture of experts. */
    this.mixture = false;
  }

  /** First places of a table that hold attention sinks, which stay though the window has passed them. */
  get sinkBlocks() {
    return this.meta.window && this.meta.sinks ? Math.ceil(this.meta.sinks / this.blocks.blockSize) : 0;
  }

  /** Whether utilisation can be told as a share of the machine's peaks. */
  get peaksKnown() {
    return this.meta.peak_bytes_s > 0 && this.meta.peak_flops_s > 0;
  }

  /**
   * A figure, step by step.
   * @param {string} name
   */
  column(name) {
    return this.series[this.columns.indexOf(name)];
  }

  /** @param {number} row */
  id(row) {
    return this.ids[row] ?? `#${row}`;
  }

  /**
   * The id as it stands inside a sentence of ours.
   * @param {number} row
   */
  name(row) {
    return isolated(this.id(row));
  }

  /**
   * Takes in one picture: history first, then the state.
   * @param {Picture | Omit<Picture, "type">} head
   * @param {Buffers} buffers
   */
  apply(head, buffers) {
    this.growHistory(head, buffers);
    this.steps = head.steps;
    this.timeline.end = head.steps + 1;
    this.step = head.step;
    this.event = head.event ?? null;
    this.moveState(head, buffers);
  }

  /**
   * @param {Omit<Picture, "type">} head
   * @param {Buffers} buffers
   */
  growHistory(head, buffers) {
    if (head.words) this.words.push(...head.words);
    for (const request of head.requests ?? []) this.arrive(request);
    this.timeline.grow(this.ids.length);
    if (buffers.ptr && buffers.seg) {
      this.timeline = Timeline.fromPointers(wordsOf(buffers.ptr), wordsOf(buffers.seg), head.steps + 1);
    }
    if (buffers.tr) this.timeline.pushAll(wordsOf(buffers.tr));
    for (const [row, words, steps] of head.out ?? []) {
      this.outputs[row].words.push(...words);
      this.outputs[row].steps.push(...steps);
    }
    for (const [row, step] of head.ended ?? []) this.outputs[row].endedAt = step;
    for (const [step, rows, parents, words, scores] of head.beams ?? []) {
      const search = this.outputs[rows[0]].search ?? [];
      search.push({ step, rows, parents, words, scores });
      for (const row of rows) this.outputs[row].search = search;
    }
    if (buffers.series) {
      const figures = floatsOf(buffers.series);
      for (let i = 0; i < figures.length; i++) this.series[i % this.columns.length].push(figures[i]);
    }
  }

  /** @param {RequestHead} request */
  arrive(request) {
    const row = this.ids.length;
    const parent = request.of === undefined ? undefined : this.index.get(request.of);
    this.root.push(parent ?? row);
    this.index.set(request.id, row);
    this.ids.push(request.id);
    this.requests.push(request);
    this.outputs.push({ words: [], steps: [], endedAt: 0 });
    this.rows.push(null);
  }

  /**
   * @param {Omit<Picture, "type">} head
   * @param {Buffers} buffers
   */
  moveState(head, buffers) {
    if (head.full) this.rows = this.ids.map(() => null);
    if (buffers.rows) this.readRows(wordsOf(buffers.rows));
    if (buffers.words) this.blocks.replace(wordsOf(buffers.words));
    if (buffers.blocks) this.blocks.apply(wordsOf(buffers.blocks));
    if (buffers.marks) this.blocks.mark(wordsOf(buffers.marks));
    if (buffers.queue) {
      const [numWaiting, ...queue] = wordsOf(buffers.queue);
      this.waiting = queue.slice(0, numWaiting);
      this.running = queue.slice(numWaiting);
    }
    if (buffers.chunks) {
      this.readChunks(wordsOf(buffers.chunks));
      this.pad = head.pad ?? 0;
      this.copies = head.copies ?? [];
    }
    if (head.config) this.config = head.config;
    if (head.experts) this.mixture = true;
    this.experts = head.experts ?? null;
  }

  /** @param {Uint32Array} words */
  readRows(words) {
    for (let at = 0; at < words.length;) {
      const row = words[at];
      const numBlocks = words[at + ROW - 1];
      const same = numBlocks === SAME_BLOCKS;
      const end = at + ROW + (same ? 0 : numBlocks);
      this.rows[row] = {
        code: words[at + 1],
        computed: words[at + 2],
        cached: words[at + 3],
        outputs: words[at + 4],
        preemptions: words[at + 5],
        wait: this.words[words[at + 6]],
        need: words[at + 7],
        have: words[at + 8],
        end: this.words[words[at + 9]],
        status: STATUS[words[at + 10]],
        host: words[at + 11],
        blocks: same ? (this.rows[row]?.blocks ?? NO_BLOCKS) : words.slice(at + ROW, end),
      };
      at = end;
    }
  }

  /** @param {Uint32Array} words */
  readChunks(words) {
    this.chunks = [];
    for (let i = 0; i < words.length; i += 4) {
      this.chunks.push({
        row: words[i],
        start: words[i + 1],
        tokens: words[i + 2],
        kind: words[i + 3] & 255,
        drafts: words[i + 3] >>> 8,
      });
    }
  }

  /**
   * Whether a row is a beam whose words are still open: they follow its lineage, and are chosen when the search ends.
   * @param {number} row
   */
  searching(row) {
    const { search, endedAt } = this.outputs[row];
    const request = this.rows[row];
    if (!request || !request.outputs || !search) return false;
    return !endedAt || this.step < endedAt || (this.step === endedAt && request.status !== "finished");
  }

  /**
   * What a beam says so far; only while it is `searching`.
   * @param {number} row
   * @returns {Beam}
   */
  beam(row) {
    const search = this.outputs[row].search ?? [];
    const length = Math.min(this.rows[row]?.outputs ?? 0, search.length);
    const { rows, scores } = search[length - 1];
    let at = rows.indexOf(row);
    const score = scores[at];
    const words = [];
    const steps = [];
    for (const choosing of search.slice(0, length).reverse()) {
      words.unshift(choosing.words[at]);
      steps.unshift(choosing.step);
      at = choosing.parents[at];
    }
    return { words, steps, score, place: scores.filter((other) => other > score).length, of: rows.length };
  }

  /** What has come and what has ended so far: requests (all sequences of one must have ended), and sequences. */
  count() {
    const open = new Set();
    const come = new Set();
    let ended = 0;
    let sequences = 0;
    this.rows.forEach((request, row) => {
      if (!request) return;
      sequences++;
      come.add(this.root[row]);
      if (request.status === "finished" || request.status === "refused") ended++;
      else open.add(this.root[row]);
    });
    return { requests: come.size, done: come.size - open.size, sequences, ended };
  }

  /**
   * Rows whose table holds a block, in order of arrival.
   * @param {number} block
   */
  holders(block) {
    /** @type {number[]} */
    const holders = [];
    this.rows.forEach((request, row) => {
      if (request?.blocks.includes(block)) holders.push(row);
    });
    return holders;
  }

  /**
   * Output tokens a second over the last steps up to the cursor, on the trace's own clock.
   * @param {number} [steps]
   */
  rate(steps = 20) {
    const begins = this.column("t0");
    const ends = this.column("t1");
    const sampled = this.column("sampled");
    let tokens = 0;
    let time = 0;
    for (let i = Math.max(0, this.step - steps); i < this.step; i++) {
      tokens += sampled[i];
      time += ends[i] - begins[i];
    }
    return time > 0 ? tokens / time : NaN;
  }
}
