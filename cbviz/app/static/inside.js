// What ran inside the step at the cursor: its copies of blocks beside its pass (any step that has some), and where it was watched
// its operators or kernels as lanes over the pass' time, and the longest of them by name.
// @ts-check
import { element, setText, sync } from "./dom.js";
import { seconds, percent, plural, grouped } from "./format.js";
import { barAt, paintLanes } from "./lanes.js";

/** @import { App } from "./page/state.js" */
/** @import { Inside, Moved, Profile } from "./messages.js" */
/** @import { Bar } from "./lanes.js" */

const MOST_NAMES = 12;
const MOST_WATCHED = 8;
/** @type {Record<string, string>} */
const LANE_TEXT = {
  pass: "the pass",
  "swap-out": "swap-out: device to host",
  "swap-in": "swap-in: host to device",
  copy: "copy on the device",
};

/**
 * An operator of a profile: how often it ran and how long in all.
 * @typedef {{ index: number, name: string, count: number, time: number }} Operator
 */

/**
 * A step's spans as a profile's lanes: the pass above, below it each kind of copy, on one axis of time.
 * @param {Pick<Moved, "spans" | "clock">} moved
 * @returns {Profile & { note: string[] }}
 */
export function moves({ spans, clock }) {
  const kinds = Object.keys(LANE_TEXT).filter((kind) => spans.some(([what]) => what === kind));
  const lane = spans.map(([what]) => kinds.indexOf(what));
  const names = kinds.map((kind) => LANE_TEXT[kind]);
  return {
    names,
    lanes: names,
    name: lane,
    lane,
    start: spans.map(([, start]) => start),
    duration: spans.map(([, start, end]) => end - start),
    total: Math.max(...spans.map(([, , end]) => end)),
    note: spans.map(([, , , blocks]) => `${blocks ? `, ${plural(blocks, "block")}` : ""} (${clock})`),
  };
}

export class InsidePanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.note = element("p", { class: "cb-note cb-inside-note" });
    this.button = element("button", {
      type: "button",
      class: "cb-btn cb-small cb-watch-inside",
      text: "Watch the next step",
      onclick: () => app.send("watch-inside"),
    });
    this.others = element("span", { class: "cb-inside-steps" });
    this.kind = element("span", { class: "cb-note", text: "measured", hidden: true });
    this.canvas = element("canvas", { class: "cb-lanes", role: "img" });
    this.list = element("div", { class: "cb-inside-list" });
    this.device = element("p", { class: "cb-note" });
    this.strip = element("canvas", { class: "cb-moves", role: "img", hidden: true });
    this.copied = element("p", { class: "cb-note cb-moved", hidden: true });
    /** @type {Bar[]} bars of the profile, and of the copies: where they lie */
    this.bars = [];
    /** @type {Bar[]} */
    this.moveBars = [];
    /** @type {unknown[]} what was drawn last */
    this.drawn = [];
    host.append(
      element("div", { class: "cb-inside-head" }, this.button, this.others, this.kind),
      this.copied,
      this.strip,
      this.note,
      this.canvas,
      this.list,
      this.device,
    );
    this.canvas.addEventListener("mousemove", (event) => describeBar(this.canvas, this.bars, event));
    this.strip.addEventListener("mousemove", (event) => describeBar(this.strip, this.moveBars, event));
    this.sizes = new ResizeObserver(() => {
      this.drawn = [];
      if (app.current) this.draw();
    });
    this.sizes.observe(host);
  }

  draw() {
    const { inside, run, theme, live } = this.app;
    if (this.host.hidden) return;
    this.button.hidden = !live.can_watch;
    this.button.disabled = !!live.loading;
    const inputs = [inside, theme, this.button.hidden];
    if (inputs.every((input, i) => i < this.drawn.length && input === this.drawn[i])) return;
    this.drawn = inputs;
    const now = inside?.step === run.step ? inside : null;
    this.drawWatched(inside?.watched ?? []);
    this.drawNote(now?.profile ?? null, inside);
    this.drawMoved(now?.moved ?? null);
    this.drawProfile(now?.profile ?? null);
    setText(this.device, now ? now.device.join(". ") : "");
  }

  /** @param {number[]} watched steps that have a profile */
  drawWatched(watched) {
    sync(this.others, watched.slice(-MOST_WATCHED), {
      key: (step) => step,
      make: (step) => ({
        node: element("button", {
          type: "button",
          class: "cb-btn cb-small",
          text: `step ${grouped(step)}`,
          title: `Step ${step} was watched: show it`,
          onclick: () => this.app.seek(step),
        }),
      }),
      update: ({ node }, step) => node.classList.toggle("cb-now", step === this.app.run.step),
    });
  }

  /**
   * @param {Profile | null} profile
   * @param {Inside | null} inside
   */
  drawNote(profile, inside) {
    setText(this.note, profile ? profileText(profile) : this.whyNoProfile(inside));
    this.note.classList.toggle("cb-after", !!profile);
    this.kind.hidden = !profile;
  }

  /** @param {Inside | null} inside */
  whyNoProfile(inside) {
    const { live } = this.app;
    if (inside?.watched.length) return "This step was not watched.";
    if (live.can_watch) {
      return "Which operators or kernels does a step consist of, and which takes the time? Watch one.";
    }
    if (live.recording) return "No step of this recording was watched from inside.";
    return "Nothing is computed here that could be watched: choose the real model under Setup.";
  }

  /** @param {Moved | null} moved */
  drawMoved(moved) {
    setText(this.copied, moved ? moved.said : "");
    this.copied.hidden = !moved;
    this.strip.hidden = !moved;
    this.moveBars = [];
    if (!moved) return;
    const label = `Step ${this.app.run.step}. ${moved.said}`;
    this.moveBars = paintLanes(this.strip, moves(moved), this.app.theme, { names: true });
    this.strip.setAttribute("aria-label", label);
  }

  /** @param {Profile | null} profile */
  drawProfile(profile) {
    const { run, theme } = this.app;
    this.canvas.hidden = !profile;
    this.bars = profile ? paintLanes(this.canvas, profile, theme, { names: false }) : [];
    const operators = profile ? longestFirst(profile) : [];
    const all = operators.reduce((sum, { time }) => sum + time, 0);
    const longest = operators.slice(0, 4).map(({ name, time }) => `${name} ${percent(time / all)}`);
    this.canvas.setAttribute("aria-label", `Inside step ${run.step}: ${longest.join(", ")}`);
    sync(this.list, operators.slice(0, MOST_NAMES), {
      key: ({ name }) => name,
      make: (operator) => new OperatorRow(operator),
      update: (row, { index, count, time }) => {
        row.sign.style.background = theme.owners.css[index & 255];
        setText(row.time, seconds(time));
        setText(row.share, `${percent(time / all)}, ${grouped(count)} ×`);
      },
    });
  }

  destroy() {
    this.sizes.disconnect();
  }
}

class OperatorRow {
  /** @param {Operator} operator */
  constructor({ name }) {
    this.sign = element("i", { "aria-hidden": "true" });
    this.time = element("b");
    this.share = element("em");
    const title = element("span", { text: name, title: name });
    this.node = element("div", { class: "cb-inside-row" }, this.sign, title, this.time, this.share);
  }
}

/** @param {Profile} profile */
function profileText({ total, source, lanes }) {
  const names = lanes.map((lane, i) => (lanes.length > 1 ? `${i + 1}: ${lane}` : lane));
  return `${seconds(total)} measured by ${source}. ${names.join("; ")}.`;
}

/**
 * The operators of a profile, the longest first.
 * @param {Profile} profile
 */
function longestFirst({ name, names, duration }) {
  /** @type {Map<number, Operator>} */
  const operators = new Map();
  name.forEach((index, i) => {
    const operator = operators.get(index) ?? { index, name: names[index], count: 0, time: 0 };
    operator.count++;
    operator.time += duration[i];
    operators.set(index, operator);
  });
  return [...operators.values()].sort((a, b) => b.time - a.time);
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Bar[]} bars
 * @param {MouseEvent} event
 */
function describeBar(canvas, bars, event) {
  const bar = barAt(bars, event.offsetX, event.offsetY);
  canvas.title = bar ? `${bar.name}: ${seconds(bar.duration)}, from ${seconds(bar.start)}${bar.note}` : "";
}
