// A recorded run without a kernel: stands in for it, and speaks its messages. Pure: no DOM.
// @ts-check

/** @import { Fold } from "./fold.js" */
/** @import { Buffers, Command, FromKernel, Live, Picture, ToKernel } from "./messages.js" */

/** @typedef {(message: FromKernel, buffers: DataView<ArrayBuffer>[]) => void} Listener */

/** Pictures that may be on their way without having been acknowledged. */
const WINDOW = 4;
/** Milliseconds between two explanations while the run plays. */
const EXPLAIN_EVERY = 250;
const FIRST_SPEED = 10;
/** Buffers that belong to the state at a cursor, not to the history. */
const STATE_PARTS = new Set(["words", "blocks", "rows", "marks", "queue", "chunks"]);

/**
 * @param {string} base64 gzipped
 */
export async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(unpacked).arrayBuffer());
}

/** The kernel's side of the page: the anywidget model's interface, and what app/player.py does with a recording. */
export class Recorded {
  /**
   * @param {Fold} fold
   * @param {number} [step] where the page begins
   */
  constructor(fold, step = fold.head.step) {
    this.fold = fold;
    this.start = Math.max(0, Math.min(fold.steps, step));
    /** @type {Set<Listener>} */
    this.listeners = new Set();
    this.playing = false;
    this.speed = FIRST_SPEED;
    /** Numbers of the last picture that was sent, and that was acknowledged. */
    this.sent = 0;
    this.acknowledged = 0;
    this.timer = 0;
    this.explainedAt = 0;
    /** The accounts are shown. */
    this.accounting = false;
    /** @type {Record<string, (command: Command) => void>} */
    this.commands = {
      seek: ({ step: to }) => this.seek(Number(to)),
      reset: () => this.seek(0),
      back: () => this.seek(fold.event === null ? fold.step - 1 : fold.step),
      end: () => this.seek(fold.steps),
      step: () => this.oneStep(),
      event: ({ by }) => this.oneEvent(Number(by) > 0),
      speed: ({ value }) => this.setSpeed(Number(value)),
      account: ({ on }) => this.account(!!on),
      play: () => this.play(),
      pause: () => this.pause(),
    };
  }

  // the model's interface ------------------------------------------------------------------------------------

  /**
   * @param {string} event
   * @param {Listener} listener
   */
  on(event, listener) {
    if (event === "msg:custom") this.listeners.add(listener);
  }

  /**
   * @param {string} _event
   * @param {Listener} listener
   */
  off(_event, listener) {
    this.listeners.delete(listener);
  }

  get() {
    return undefined;
  }

  /** @param {ToKernel} message */
  send(message) {
    if (message.type === "ready") this.begin();
    else if (message.type === "ack") this.acknowledged = Math.max(this.acknowledged, message.seq);
    else if (message.type === "cmd") this.commands[message.cmd]?.(message);
  }

  /**
   * @param {FromKernel} message
   * @param {DataView<ArrayBuffer>[]} [buffers]
   */
  emit(message, buffers = []) {
    for (const listener of this.listeners) listener(message, buffers);
  }

  // commands -------------------------------------------------------------------------------------------------

  begin() {
    this.sent = 0;
    this.acknowledged = 0;
    this.tell();
    this.fold.go(this.start, null);
    this.picture(true, true);
    this.explain();
  }

  /** @param {number} step */
  seek(step) {
    this.pause();
    this.go(Math.max(0, Math.min(this.fold.steps, step)), null);
  }

  /** Whether the cursor is behind the last step. */
  get atEnd() {
    const { step, event, steps } = this.fold;
    return event === null && step === steps;
  }

  oneStep() {
    this.pause();
    if (this.atEnd) this.tell({ banner: "This is a recording, and this was its last step." });
    else this.goOn();
  }

  /** To the end of the next step, or of the one that the cursor is inside of. */
  goOn() {
    const { step, event } = this.fold;
    this.go(event === null ? step + 1 : step, null);
  }

  /**
   * Inside step N the cursor is (N, k), k events of it done; all of them done is (N, null).
   * @param {boolean} on else back
   */
  oneEvent(on) {
    this.pause();
    const { fold } = this;
    let { step, event } = fold;
    if (on && event === null) {
      if (step >= fold.steps) return;
      step++;
      event = 0;
    } else if (event === null) {
      if (!step) return;
      event = fold.events(step);
    }
    event += on ? 1 : -1;
    const numEvents = fold.events(step);
    if (event > 0 && event < numEvents) this.go(step, event);
    else this.go(event >= numEvents ? step : step - 1, null);
  }

  /** @param {number} stepsPerSecond 0: as fast as it goes */
  setSpeed(stepsPerSecond) {
    this.speed = Math.max(0, stepsPerSecond);
    this.tell();
  }

  /** @param {boolean} on */
  account(on) {
    this.accounting = on;
    this.explain();
  }

  play() {
    if (this.playing) return;
    this.playing = true;
    this.tell();
    if (this.fold.step === this.fold.steps) this.go(0, null);
    this.beatLater();
  }

  pause() {
    clearTimeout(this.timer);
    if (!this.playing) return;
    this.playing = false;
    this.tell();
    this.explain();
  }

  beatLater() {
    this.timer = setTimeout(() => this.beat(), this.speed ? 1000 / this.speed : 0);
  }

  /** One step of playing; a page that is behind is waited for. */
  beat() {
    if (!this.playing) return;
    if (this.sent - this.acknowledged < WINDOW) {
      if (this.atEnd) {
        this.pause();
        return;
      }
      this.goOn();
    }
    this.beatLater();
  }

  /**
   * @param {number} step
   * @param {number | null} event
   */
  go(step, event) {
    const straightOn = this.fold.go(step, event);
    this.picture(!straightOn);
    if (!this.playing || Date.now() - this.explainedAt > EXPLAIN_EVERY) this.explain();
  }

  // messages -------------------------------------------------------------------------------------------------

  /**
   * @param {Live} [more]
   * @returns {Live}
   */
  live(more = {}) {
    const { head } = this.fold;
    return {
      loading: null,
      progress: -1,
      open: true,
      playing: this.playing,
      speed: this.speed,
      num_requests: head.num_requests,
      title: head.title,
      recording: "it is a page",
      banner: null,
      bad: false,
      offer: null,
      ...more,
    };
  }

  /** @param {Live} [more] */
  tell(more) {
    this.emit({ type: "live", live: this.live(more) });
  }

  /**
   * @param {boolean} full all of the state, not what has changed
   * @param {boolean} [reset] the history too
   */
  picture(full, reset = false) {
    const { fold } = this;
    const { step, event, steps, pad, config } = fold;
    const { first, copies } = fold.head;
    /** @type {Partial<Record<keyof Buffers, ArrayBufferView<ArrayBuffer>>>} */
    const parts = fold.parts(full);
    const history = reset ? first.b.filter((name) => !STATE_PARTS.has(name)) : [];
    for (const name of history) parts[name] = fold.buffers[name];
    const experts = fold.experts(step);
    /** @type {Picture} */
    const message = {
      ...(reset ? first : /** @type {typeof first} */ ({})),
      type: "picture",
      steps,
      step,
      event,
      pad,
      config,
      copies: copies?.[step],
      ...(reset ? { live: this.live() } : {}),
      ...(experts ? { experts } : {}),
      ...(full ? { full } : {}),
      b: /** @type {(keyof Buffers)[]} */ (Object.keys(parts)),
      seq: ++this.sent,
    };
    const views = Object.values(parts).map(
      (part) => new DataView(part.buffer, part.byteOffset, part.byteLength),
    );
    this.emit(message, views);
  }

  /** The sentences of the step that is shown, what was watched inside it, its accounts, and the figures up to it. */
  explain() {
    this.explainedAt = Date.now();
    const { fold } = this;
    const { head, step, event } = fold;
    const [items, events] = fold.sentences(step);
    this.emit({
      type: "why",
      step,
      event,
      items,
      num_events: events.length,
      watched: [],
      ...(event ? { moment: events[event - 1] } : {}),
    });
    const notWatched = { step, watched: head.watched, device: [], profile: null };
    this.emit(head.inside[step] || { type: "inside", ...notWatched });
    if (this.accounting && step) this.emit(fold.account(step, !this.playing));
    this.emitFigures(event === null ? step : step - 1);
  }

  /**
   * Figures up to a step; of a long run: up to the last step that has them.
   * @param {number} upto
   */
  emitFigures(upto) {
    const { names, at, clock } = this.fold.head.figures;
    const { figures } = this.fold.buffers;
    const row = at.findLastIndex((step) => step <= upto);
    if (row < 0) return;
    /** @type {Record<string, number>} */
    const values = {};
    names.forEach((name, i) => {
      const value = figures.getFloat64(8 * (i * at.length + row), true);
      if (!Number.isNaN(value)) values[name] = value;
    });
    this.emit({ type: "metrics", steps: at[row], clock, values });
  }
}
