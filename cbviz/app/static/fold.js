// The state of a recorded run at a cursor, folded from a strip of changes. The strip's format is told in app/export.py. Pure: no DOM.
// @ts-check
import { ROW, SAME_BLOCKS, wordsOf } from "./store.js";

/** @import { Account, Buffers, ExpertLoad, Inside, NoAccount, Parts, Picture, Reservation, Sentence, StepConfig } from "./messages.js" */

/**
 * What the page knows of the run beside the buffers.
 * @typedef {{
 *   buffers: [name: string, size: number][],
 *   first: Omit<Picture, "type"> & { config: StepConfig },
 *   title: string[], num_requests: number, step: number,
 *   configs: StepConfig[], copies?: Record<number, [number, number][]>,
 *   said: { frames: [kind: string, first: string, ...rest: string[]][], ids: string[] },
 *   accounts: { missing?: string, tokens: string[], slots: string[], rows: number[][], reservation?: Reservation },
 *   experts?: { layers: number[], num: number, rows: (number[] | null)[] } | null,
 *   figures: { names: string[], at: number[], clock: string },
 *   inside: Record<number, Inside>, watched: number[],
 * }} RunHead
 */
/**
 * A request as numbers (all words of its row but index and number of blocks), and its table.
 * @typedef {{ fields: number[], blocks: number[] }} FoldedRow
 */
/**
 * The state after a whole step.
 * @typedef {{
 *   step: number, rows: (FoldedRow | null)[], words: Uint32Array<ArrayBuffer>, waiting: number[], running: number[],
 *   config: StepConfig, chunks: number[], pad: number, marks: Set<number>,
 * }} Kept
 */

/** Numbers of a row between its index and its number of blocks. */
const FIELDS = ROW - 2;
/** Steps between two states that are kept; of a long run more, so that about 200 are. */
const KEEP_EVERY = 64;
const MOST_KEPT = 200;
/** A jump of more steps is sent in full. */
const MOST_FOLDS = 200;
/** Parts of a tick, as bits of its first number. */
const HAS_BLOCKS = 1;
const HAS_QUEUE = 2;
const HAS_CONFIG = 4;

/** Reads the strip's numbers: seven bits a byte, the lowest first. */
class NumberReader {
  /** @param {DataView<ArrayBuffer>} view */
  constructor(view) {
    this.bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
    this.at = 0;
  }

  number() {
    let value = 0;
    let weight = 1;
    let byte = 0;
    do {
      byte = this.bytes[this.at++];
      value += (byte & 127) * weight;
      weight *= 128;
    } while (byte & 128);
    return value;
  }

  signed() {
    const value = this.number();
    return value & 1 ? -(value + 1) / 2 : value / 2;
  }

  /**
   * A list as a change of the one before: so many of its first and of its last stay, others stand in between.
   * @param {number[]} old
   */
  splice(old) {
    const front = this.number();
    const back = this.number();
    const list = old.slice(0, front);
    for (let left = this.number(); left; left--) list.push(this.number());
    for (let i = old.length - back; i < old.length; i++) list.push(old[i]);
    return list;
  }
}

/** @param {(FoldedRow | null)[]} rows */
const copyRows = (rows) => rows.map((row) => row && { fields: row.fields.slice(), blocks: row.blocks });

export class Fold {
  /** @param {Uint8Array<ArrayBuffer>} bytes what app/export.py packed */
  constructor(bytes) {
    const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    /** @type {RunHead} */
    this.head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    /** @type {Record<string, DataView<ArrayBuffer>>} */
    this.buffers = {};
    let offset = 4 + length;
    for (const [name, size] of this.head.buffers) {
      offset = (offset + 7) & ~7;
      this.buffers[name] = new DataView(bytes.buffer, bytes.byteOffset + offset, size);
      offset += size;
    }
    const { strip, offsets, said, saidat, words } = this.buffers;
    this.strip = new NumberReader(strip);
    /** Where each step begins in the strip. */
    this.offsets = wordsOf(offsets);
    this.said = new NumberReader(said);
    this.saidAt = wordsOf(saidat);
    this.steps = this.head.first.steps;
    this.every = Math.max(KEEP_EVERY, Math.ceil(this.steps / MOST_KEPT));

    // the cursor and its state
    this.step = 0;
    /** @type {number | null} */
    this.event = null;
    /** @type {(FoldedRow | null)[]} */
    this.rows = [];
    this.words = wordsOf(words).slice();
    /** @type {number[]} */
    this.waiting = [];
    /** @type {number[]} */
    this.running = [];
    /** @type {number[]} */
    this.chunks = [];
    this.pad = 0;
    this.config = this.head.first.config;
    /** @type {Set<number>} blocks that the last step changed */
    this.marks = new Set();

    // what has changed since it was last asked for
    /** @type {Set<number>} */
    this.changedBlocks = new Set();
    /** @type {Set<number>} */
    this.changedRows = new Set();
    /** @type {Set<number>} rows whose table has changed */
    this.changedTables = new Set();
    this.changedQueue = true;

    /** @type {{ step: number, sums: number[] } | null} tokens of each expert up to a step */
    this.expertSums = null;
    /** @type {Map<number, Kept>} */
    this.kept = new Map();
    this.keep();
  }

  // moving ---------------------------------------------------------------------------------------------------

  keep() {
    if (this.kept.has(this.step)) return;
    const { step, waiting, running, config, chunks, pad, marks } = this;
    const rows = copyRows(this.rows);
    const words = this.words.slice();
    this.kept.set(step, { step, rows, words, waiting, running, config, chunks, pad, marks });
  }

  /** @param {number} step of a state that is kept */
  goBack(step) {
    const kept = this.kept.get(step);
    if (!kept) throw new Error(`no state is kept at step ${step}`);
    Object.assign(this, kept);
    this.event = null;
    this.rows = copyRows(kept.rows);
    this.words = kept.words.slice();
    this.clearChanges();
  }

  clearChanges() {
    this.changedBlocks.clear();
    this.changedRows.clear();
    this.changedTables.clear();
    this.changedQueue = false;
  }

  /**
   * Moves to a step, inside it after some of its events.
   * @param {number} step
   * @param {number | null} event null: after all
   * @returns {boolean} whether it went straight on, so that what has changed is known
   */
  go(step, event) {
    const base = event === null ? step : step - 1;
    const whole = this.event === null && event === null;
    const straightOn = whole && step >= this.step && step - this.step <= MOST_FOLDS;
    if (!straightOn) {
      let from = base - (base % this.every);
      while (!this.kept.has(from)) from -= this.every;
      if (this.event !== null || this.step > base || this.step < from) this.goBack(from);
    }
    while (this.step < base) this.next(null);
    if (event !== null) this.next(event);
    return straightOn;
  }

  /**
   * Number of events of a step; reads on from its begin.
   * @param {number} step
   */
  events(step) {
    this.strip.at = this.offsets[step - 1];
    return this.strip.number() - 1;
  }

  /** @param {number | null} upto only so many events; null: the whole step */
  next(upto) {
    const { strip } = this;
    const numEvents = this.events(this.step + 1);
    this.pad = strip.number();
    this.chunks = [];
    for (let left = 4 * strip.number(); left; left--) this.chunks.push(strip.number());
    this.marks = new Set();
    const ticks = upto === null ? numEvents + 1 : Math.min(numEvents + 1, upto);
    for (let i = 0; i < ticks; i++) this.tick();
    this.step++;
    this.event = upto;
    if (upto === null && this.step % this.every === 0) this.keep();
  }

  /** What one event has changed. */
  tick() {
    const { strip } = this;
    const what = strip.number();
    for (let left = Math.floor(what / 8); left; left--) this.changeRow();
    if (what & HAS_BLOCKS) this.changeBlocks();
    if (what & HAS_QUEUE) {
      this.waiting = strip.splice(this.waiting);
      this.running = strip.splice(this.running);
      this.changedQueue = true;
    }
    if (what & HAS_CONFIG) this.config = this.head.configs[strip.number()];
  }

  changeRow() {
    const { strip } = this;
    const index = strip.number();
    const mask = strip.number();
    while (this.rows.length <= index) this.rows.push(null);
    const row = this.rows[index] ?? { fields: new Array(FIELDS).fill(0), blocks: [] };
    this.rows[index] = row;
    for (let i = 0; i < FIELDS; i++) if (mask & (1 << i)) row.fields[i] += strip.signed();
    const before = row.blocks;
    row.blocks = strip.splice(before);
    const same = row.blocks.length === before.length && row.blocks.every((block, i) => block === before[i]);
    if (!same) this.changedTables.add(index);
    this.changedRows.add(index);
  }

  changeBlocks() {
    const { strip } = this;
    let block = 0;
    for (let left = strip.number(); left; left--) {
      block += strip.signed();
      this.words[2 * block] = strip.number();
      this.words[2 * block + 1] = strip.number() * 65536 + strip.number();
      this.changedBlocks.add(block);
      this.marks.add(block);
    }
  }

  // asking ---------------------------------------------------------------------------------------------------

  /**
   * The buffers of a picture: all of the state, or what changed since they were last asked for.
   * @param {boolean} full
   */
  parts(full) {
    /** @type {Partial<Record<keyof Buffers, Uint32Array<ArrayBuffer>>>} */
    const parts = {};
    const rows = this.rowWords(full);
    if (rows.length) parts.rows = Uint32Array.from(rows);
    if (full) parts.words = this.words.slice();
    else if (this.changedBlocks.size) parts.blocks = Uint32Array.from(this.blockWords());
    if (full || this.changedQueue) {
      parts.queue = Uint32Array.from([this.waiting.length, ...this.waiting, ...this.running]);
    }
    parts.marks = Uint32Array.from([...this.marks].filter((block) => block).sort((a, b) => a - b));
    parts.chunks = Uint32Array.from(this.chunks);
    this.clearChanges();
    return parts;
  }

  /** @param {boolean} full */
  rowWords(full) {
    const words = [];
    const indices = full ? this.rows.keys() : [...this.changedRows].sort((a, b) => a - b);
    for (const index of indices) {
      const row = this.rows[index];
      if (!row) continue;
      words.push(index, ...row.fields);
      if (full || this.changedTables.has(index)) words.push(row.blocks.length, ...row.blocks);
      else words.push(SAME_BLOCKS);
    }
    return words;
  }

  blockWords() {
    return [...this.changedBlocks].flatMap((block) => [
      block,
      this.words[2 * block],
      this.words[2 * block + 1],
    ]);
  }

  /**
   * The sentences of a step, and those of its events. A sentence is a frame of texts with numbers in between,
   * each told by its difference from the one in the sentence of that frame before.
   * @param {number} step
   * @returns {[Sentence[], Sentence[]]}
   */
  sentences(step) {
    this.said.at = this.saidAt[step];
    /** @type {Map<number, number[]>} */
    const lastNumbers = new Map();
    const cursor = { id: 0 };
    const list = () =>
      Array.from({ length: this.said.number() }, () => this.readSentence(lastNumbers, cursor));
    return [list(), list()];
  }

  /**
   * @param {Map<number, number[]>} lastNumbers by frame
   * @param {{ id: number }} cursor the id that was named last
   * @returns {Sentence}
   */
  readSentence(lastNumbers, cursor) {
    const { said } = this;
    const { frames, ids } = this.head.said;
    const frame = said.number();
    const [kind, first, ...rest] = frames[frame];
    const before = lastNumbers.get(frame);
    const numbers = rest.map((_, i) => said.signed() + (before ? before[i] : 0));
    lastNumbers.set(frame, numbers);
    const text = first + rest.map((words, i) => numbers[i] + words).join("");
    const named = Array.from({ length: said.number() }, () => {
      cursor.id += said.signed();
      return ids[cursor.id];
    });
    return { kind, text, ids: named };
  }

  /**
   * Where the step's tokens and slots were; with `whole`, the run up to it too.
   * @param {number} step
   * @param {boolean} whole
   * @returns {Account | NoAccount}
   */
  account(step, whole) {
    const { tokens, slots, rows, missing, reservation } = this.head.accounts;
    if (missing) return { type: "account", step, missing };
    const slotsAt = tokens.length;
    const end = slotsAt + slots.length;
    const row = rows[step - 1];
    /**
     * @param {string[]} names
     * @param {number[]} amounts
     */
    const named = (names, amounts) => /** @type {Parts} */ (names.map((name, i) => [name, amounts[i]]));
    /** @type {Account} */
    const account = {
      type: "account",
      step,
      tokens: named(tokens, row),
      slots: named(slots, row.slice(slotsAt, end)),
      at_event: row[end],
    };
    if (!whole) return account;
    const sums = new Array(end).fill(0);
    for (const amounts of rows.slice(0, step)) {
      for (let i = 0; i < end; i++) sums[i] += amounts[i];
    }
    const run = { steps: step, tokens: named(tokens, sums), slots: named(slots, sums.slice(slotsAt)) };
    return { ...account, run, reservation };
  }

  /**
   * Of a mixture: tokens of each expert in the step, and in all up to it. Played on, a step costs its own row.
   * @param {number} step
   * @returns {ExpertLoad | null}
   */
  experts(step) {
    const { experts } = this.head;
    const row = experts && step ? experts.rows[step - 1] : null;
    if (!experts || !row) return null;
    if (!this.expertSums || this.expertSums.step > step) {
      this.expertSums = { step: 0, sums: new Array(row.length).fill(0) };
    }
    const { expertSums } = this;
    for (; expertSums.step < step; expertSums.step++) {
      experts.rows[expertSums.step]?.forEach((tokens, i) => {
        expertSums.sums[i] += tokens;
      });
    }
    const byLayer = (/** @type {number[]} */ tokens) =>
      experts.layers.map((_, layer) => tokens.slice(layer * experts.num, (layer + 1) * experts.num));
    return { layers: experts.layers, load: byLayer(row), sum: byLayer(expertSums.sums) };
  }
}
