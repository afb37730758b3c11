// The timeline of one compared run, with its cursor.
// @ts-check
import { STATES, STATE_TEXT, clamp } from "./color.js";
import { TICKS, byClock, tickStep } from "./compareclock.js";
import { contextOf, element, setText } from "./dom.js";
import { cut, grouped, plural, seconds } from "./format.js";
import { paintTimeline } from "./raster.js";
import { isolated } from "./texts.js";

/** @import { App } from "./page/state.js" */
/** @import { Theme } from "./page.js" */
/** @import { Run } from "./store.js" */

/** CSS pixels for the names of requests. */
const GUTTER = 62;
/** CSS pixels of the axis below the last lane. */
const AXIS = 16;
const ROW_HEIGHT = 11;

/**
 * What all lanes share. `span`: seconds from the first start to the last end, where lanes are aligned by time.
 * `columns`: the last column; steps, or ticks of the clock.
 * @typedef {{ byTime: boolean, span: [number, number], columns: number }} Alignment
 */

/**
 * Seconds from the first start to the last end.
 * @param {Run[]} runs
 * @returns {[number, number]}
 */
export function spanOf(runs) {
  const begun = runs.filter((run) => run.steps);
  if (!begun.length) return [0, 1];
  return [
    Math.min(...begun.map((run) => run.column("t0")[0])),
    Math.max(...begun.map((run) => run.column("t1")[run.steps - 1])),
  ];
}

export class Lane {
  /**
   * @param {App} app
   * @param {Run} run
   * @param {string} name
   * @param {(() => void) | null} finish runs the branch to its end
   * @param {(step: number) => void} go
   */
  constructor(app, run, name, finish, go) {
    this.app = app;
    this.run = run;
    this.name = name;
    this.height = 0;
    /** @type {Alignment} */
    this.alignment = { byTime: false, span: [0, 1], columns: 1 };
    this.canvas = element("canvas", { role: "img", "aria-label": `Timeline of ${name}` });
    this.cursor = element("div", { class: "cb-lanecursor" });
    this.now = element("span", { class: "cb-note" });
    const finishButton = finish
      ? element("button", {
          type: "button",
          class: "cb-btn cb-small cb-finish",
          text: "Run to its end",
          onclick: finish,
        })
      : null;
    this.node = element(
      "div",
      { class: "cb-lane", "data-run": name },
      element(
        "div",
        { class: "cb-lanehead" },
        element("b", { dir: "auto", text: cut(name, 80), title: name }),
        element("span", { class: "cb-note", text: plural(run.steps, "step") }),
        this.now,
        element("span", { class: "cb-grow" }),
        finishButton,
      ),
      element("div", { class: "cb-lanebox" }, this.canvas, this.cursor),
    );
    this.canvas.addEventListener("click", (event) => go(this.stepAt(event)));
    this.canvas.addEventListener("mousemove", (event) => {
      this.canvas.title = this.describe(event);
    });
  }

  get numRows() {
    return Math.max(1, this.run.ids.length);
  }

  /**
   * @param {number} width CSS pixels
   * @param {Alignment} alignment
   * @param {boolean} withAxis below it
   */
  paint(width, alignment, withAxis) {
    const { run, canvas } = this;
    const { theme } = this.app;
    const ratio = devicePixelRatio || 1;
    this.alignment = alignment;
    this.height = clamp(this.numRows * ROW_HEIGHT, 66, 132);
    const gutter = Math.round(GUTTER * ratio);
    const pictureWidth = Math.round(width * ratio) - gutter;
    const pictureHeight = Math.round(this.height * ratio);
    const axis = withAxis ? Math.round(AXIS * ratio) : 0;
    canvas.width = gutter + pictureWidth;
    canvas.height = pictureHeight + axis;
    canvas.style.height = `${this.height + axis / ratio}px`;
    const { byTime, span, columns } = alignment;
    const timeline = byTime ? byClock(run, span[0], span[1]) : run.timeline;
    const view = { x0: 0.5, x1: columns + 0.5, y0: -0.5, y1: this.numRows - 0.5 };
    const image = new ImageData(pictureWidth, pictureHeight);
    const pixels = new Uint32Array(image.data.buffer);
    paintTimeline(pixels, pictureWidth, pictureHeight, timeline, view, theme.states, ratio);
    const context = contextOf(canvas);
    context.putImageData(image, gutter, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.paintNames(context, theme);
    if (withAxis) this.paintAxis(context, width);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Theme} theme
   */
  paintNames(context, theme) {
    const { run, height, numRows } = this;
    context.font = `10px ${theme.font}`;
    context.fillStyle = theme.mute;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const each = Math.max(1, Math.ceil(ROW_HEIGHT / (height / numRows)));
    for (let row = 0; row < run.ids.length; row += each) {
      context.fillText(isolated(cut(run.id(row), 9)), GUTTER - 6, ((row + 0.5) * height) / numRows);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} width
   */
  paintAxis(context, width) {
    const { byTime, span, columns } = this.alignment;
    const top = byTime ? span[1] - span[0] : columns;
    const stride = tickStep(top);
    const y = this.height + 9;
    context.textAlign = "center";
    for (let value = stride; value <= top * 0.97; value += stride) {
      const share = (byTime ? value : value - 0.5) / top;
      context.fillText(byTime ? seconds(value) : grouped(value), GUTTER + share * (width - GUTTER), y);
    }
    context.textAlign = "right";
    context.fillText(byTime ? "time" : "step", GUTTER - 6, y);
  }

  /**
   * Where the end of a step lies, in columns.
   * @param {number} step
   */
  columnOf(step) {
    const { byTime, span } = this.alignment;
    if (!byTime) return step + 0.5;
    if (!step) return 0.5;
    const time = this.run.column("t1")[step - 1] - span[0];
    return 1.5 + ((TICKS - 1) * time) / (span[1] - span[0] || 1);
  }

  /** @param {number} step */
  drawCursor(step) {
    const { run } = this;
    const share = clamp((this.columnOf(step) - 0.5) / this.alignment.columns, 0, 1);
    this.cursor.style.left = `calc(${GUTTER}px + (100% - ${GUTTER}px) * ${share})`;
    this.cursor.style.height = `${this.height}px`;
    this.node.dataset.step = String(step);
    /** @param {string} name */
    const figure = (name) => run.column(name)[step - 1];
    const text = step
      ? `at step ${grouped(step)}: ${figure("running")} running, ${figure("waiting")} waiting, ` +
        `${seconds(figure("t1"))} ${run.meta.clock}`
      : "at the start";
    setText(this.now, text);
  }

  /**
   * The column and the row under the mouse.
   * @param {MouseEvent} event
   */
  placeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = clamp((event.clientX - box.left - GUTTER) / (box.width - GUTTER), 0, 1);
    return {
      column: 0.5 + share * this.alignment.columns,
      row: Math.floor((event.clientY - box.top) / (this.height / this.numRows)),
    };
  }

  /** @param {MouseEvent} event */
  stepAt(event) {
    const { byTime, span } = this.alignment;
    const { steps } = this.run;
    const { column } = this.placeAt(event);
    if (!byTime) return clamp(Math.round(column), 0, steps);
    const time = span[0] + ((column - 1) / (TICKS - 1)) * (span[1] - span[0]);
    const ends = this.run.column("t1");
    let done = 0;
    while (done < steps && ends[done] < time) done++;
    return Math.min(steps, done + 1);
  }

  /** @param {MouseEvent} event */
  describe(event) {
    const { run } = this;
    const step = this.stepAt(event);
    const { row } = this.placeAt(event);
    const cell = row < run.ids.length ? run.timeline.at(row, step) : null;
    if (!cell) return `step ${step}`;
    return `${run.name(row)}, step ${step}: ${STATE_TEXT[STATES[cell.state]]}`;
  }
}
