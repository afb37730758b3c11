// Requests x steps: what each request was at each step. The picked request is a row, the cursor a column.
// @ts-check
import { paintTimeline } from "./raster.js";
import { clamp } from "./color.js";
import { cut } from "./format.js";
import { onAxis } from "./texts.js";
import { Frame } from "./frame.js";
import { paintTimelineOver } from "./timelineover.js";
import { describeCell, digestCells, summarizeTimeline } from "./timelinewords.js";

/** @import { App } from "./page/state.js" */
/** @import { Geometry, Place, PlotlyLibrary, PlotLayout, Relayout } from "./page.js" */

const STRIDES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
/** Steps on screen: at first, and at most without the user's zoom. */
const FIRST_STEPS = 60;
const MOST_STEPS = 480;
const LEAST_ROWS = 8;
/** CSS pixels of a name on the axis. */
const NAME_PX = 10.5;
/** @type {Record<string, number>} rows that a key moves by */
const KEY_ROWS = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 };

export class TimelineView {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(Plotly, host, app) {
    this.app = app;
    /** @type {{ row: number, step: number } | null} */
    this.hovered = null;
    /** The window of steps goes along with the cursor. */
    this.follow = true;
    this.steps = FIRST_STEPS;
    /** Rows that the axis has room for; 0: not set yet. */
    this.roomFor = 0;
    this.numIds = 0;
    this.ticksKey = "";
    /** We are moving the axes ourselves. */
    this.setting = false;
    /** @type {{ key: string, data: unknown[], end: number } | null} what the canvas shows */
    this.painted = null;
    this.frame = new Frame(Plotly, host, {
      role: "timeline",
      label: "Timeline of requests by step",
      scroll: true,
      markDirty: () => app.markDirty(),
      layout: () => this.axes(),
      home: () => this.home(),
      paint: (frame, context, geometry) => this.paint(frame, context, geometry),
      paintOver: (_, context, geometry) => paintTimelineOver(context, geometry, app, this.hovered),
      hover: (place) => this.hover(place),
      click: (place) => this.click(place),
      key: (event) => this.key(event),
      moved: (frame) => this.moved(frame.geometry()),
    });
  }

  /** Another run: the window is as at first. */
  restart() {
    this.steps = FIRST_STEPS;
    this.follow = true;
    this.roomFor = 0;
    this.ticksKey = "";
  }

  // axes -----------------------------------------------------------------------------------------------------

  /** @returns {PlotLayout} */
  axes() {
    const ranges = this.ranges();
    const rows = this.numRows();
    return {
      margin: { l: 62, b: 34 },
      xaxis: {
        range: ranges.x,
        title: { text: "step" },
        tickformat: ",d",
        minallowed: -20,
        nticks: 12,
      },
      yaxis: {
        range: ranges.y,
        tickcolor: "rgba(0,0,0,0)",
        minallowed: -0.5,
        maxallowed: rows - 0.5,
        ...this.rowTicks(rows, 150, -0.5, rows - 0.5),
        showline: false,
        tickfont: { size: 10 },
      },
    };
  }

  /** A row for each sequence that has come, and one for each request still to come. */
  numRows() {
    const { run } = this.app;
    const come = run.root.filter((root, row) => root === row).length;
    return Math.max(LEAST_ROWS, run.ids.length + Math.max(0, this.app.numRequests - come));
  }

  /** The window of steps around the cursor, and all rows. */
  ranges() {
    const { run } = this.app;
    while (this.steps < MOST_STEPS && run.steps > this.steps - 3) this.steps *= 2;
    const width = this.steps;
    const quarter = width / 4;
    const start = run.step <= width ? 0 : Math.ceil((run.step - width) / quarter) * quarter;
    return { x: [start + 0.5, start + width + 0.5], y: [this.numRows() - 0.5, -0.5] };
  }

  /** @returns {Relayout} */
  home() {
    this.follow = true;
    this.steps = FIRST_STEPS;
    const ranges = this.ranges();
    return { "xaxis.range": ranges.x, "yaxis.range": ranges.y };
  }

  /**
   * Names of rows, as many as fit.
   * @param {number} numRows
   * @param {number} height CSS pixels
   * @param {number} top first row on screen
   * @param {number} bottom last row on screen
   */
  rowTicks(numRows, height, top, bottom) {
    const { run, theme } = this.app;
    const span = Math.max(1, bottom - top);
    const fitting = Math.max(1, Math.floor(height / (NAME_PX * theme.scale)));
    const stride = STRIDES.find((rows) => span / rows <= fitting) ?? STRIDES[STRIDES.length - 1];
    const first = Math.max(0, Math.floor((top - span) / stride) * stride);
    const rows = [];
    for (let row = first; row < Math.min(run.ids.length, bottom + span); row += stride) rows.push(row);
    return {
      tickmode: "array",
      tickvals: rows,
      ticktext: rows.map((row) => onAxis(cut(run.id(row), 9))),
    };
  }

  updateTicks() {
    if (!this.frame.ready) return;
    const { run } = this.app;
    const geometry = this.frame.geometry();
    const ticks = this.rowTicks(run.ids.length, geometry.height, geometry.y0, geometry.y1);
    const key = [ticks.tickvals[0], ticks.tickvals[1], ticks.tickvals.length, ticks.ticktext.at(-1)].join(
      ":",
    );
    if (key === this.ticksKey) return;
    this.ticksKey = key;
    this.frame.setRange({ "yaxis.tickvals": ticks.tickvals, "yaxis.ticktext": ticks.ticktext });
  }

  /**
   * The user has zoomed or panned: the window follows only while the cursor is in it.
   * @param {Geometry} geometry
   */
  moved(geometry) {
    const { step } = this.app.run;
    if (!this.setting) this.follow = step <= geometry.x1 + 1 && step >= geometry.x0;
    this.updateTicks();
  }

  /** Whether requests have come, or are to come, for which the axis has no row yet. */
  get lacksRows() {
    return this.roomFor > 0 && this.numRows() !== this.roomFor;
  }

  /** After a picture: keeps the cursor in view (by quarters of the window, so that a relayout is rare) and the rows complete. */
  advance() {
    this.frame.underDirty = true;
    if (!this.frame.ready) return;
    const { run } = this.app;
    const geometry = this.frame.geometry();
    const update = { ...this.growRows(geometry), ...this.followCursor(geometry) };
    if (Object.keys(update).length) {
      this.setting = true;
      this.frame.setRange(update).then(() => {
        this.setting = false;
        this.updateTicks();
      });
    } else if (this.numIds !== run.ids.length) {
      this.updateTicks();
    }
    this.numIds = run.ids.length;
  }

  /**
   * @param {Geometry} geometry
   * @returns {Relayout}
   */
  growRows(geometry) {
    const rows = this.numRows();
    const before = this.roomFor;
    if (rows === before) return {};
    this.roomFor = rows;
    /** @type {Relayout} */
    const update = { "yaxis.maxallowed": rows - 0.5 };
    const sawLastRow = !before || geometry.y1 >= before - 0.75;
    if (sawLastRow) update["yaxis.range"] = [rows - 0.5, geometry.y0 <= 0 ? -0.5 : geometry.y0];
    return update;
  }

  /**
   * @param {Geometry} geometry
   * @returns {Relayout}
   */
  followCursor(geometry) {
    const { step } = this.app.run;
    const inView = step <= geometry.x1 - 3 && step >= geometry.x0;
    if (!this.follow || inView) return {};
    const before = this.steps;
    const range = this.ranges().x;
    const same = this.steps === before && range[0] === geometry.x0 && range[1] === geometry.x1;
    return same ? {} : { "xaxis.range": range };
  }

  // painting -------------------------------------------------------------------------------------------------

  /**
   * Paints all columns, or only those of new steps where nothing else has changed.
   * @param {Frame} frame
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paint(frame, context, geometry) {
    const { timeline } = this.app.run;
    const { states } = this.app.theme;
    const { x0, x1, y0, y1, deviceWidth: width, deviceHeight: height, ratio } = geometry;
    const key = [x0, x1, y0, y1, width, height, ratio, timeline.numRows].join();
    const before = this.painted;
    const goesOn =
      !frame.fresh &&
      before?.key === key &&
      before.data[0] === timeline &&
      before.data[1] === states &&
      before.end <= timeline.end;
    let first = 0;
    let last = width;
    if (goesOn && before) {
      const perStep = width / (x1 - x0);
      first = Math.max(0, Math.floor((before.end - 1.5 - x0) * perStep) - 2);
      last = Math.min(width, Math.ceil((timeline.end - 0.5 - x0) * perStep) + 2);
    }
    this.painted = { key, data: [timeline, states], end: timeline.end };
    const columns = last - first;
    if (columns <= 0) return;
    const { pixels } = frame;
    paintTimeline(pixels, width, height, timeline, geometry, states, ratio, first, last);
    const image =
      columns === width
        ? frame.image
        : new ImageData(new Uint8ClampedArray(pixels.buffer, 0, 4 * columns * height), columns, height);
    context.putImageData(image, first, 0);
  }

  // mouse and keys -------------------------------------------------------------------------------------------

  summary() {
    return summarizeTimeline(this.app.run);
  }

  /** @param {Place | null} place */
  hover(place) {
    const cell = place && this.showCell(place);
    if (cell?.row === this.hovered?.row && cell?.step === this.hovered?.step) return;
    this.hovered = cell;
    this.frame.repaintOver();
  }

  /**
   * Shows what is under the mouse, and returns which cell that is.
   * @param {Place} place
   */
  showCell(place) {
    const row = Math.round(place.y);
    const step = Math.round(place.x);
    const { run } = this.app;
    const known = row >= 0 && row < run.ids.length;
    const text = known
      ? (digestCells(run, this.frame.geometry(), place) ?? describeCell(run, row, step))
      : null;
    if (!text) {
      this.frame.hideTip();
      return null;
    }
    this.frame.showTip(place, text);
    return { row, step };
  }

  /** @param {Place} place */
  click(place) {
    const { run } = this.app;
    const row = Math.round(place.y);
    const step = Math.round(place.x);
    if (row >= 0 && row < run.ids.length) this.app.select(row);
    if (step >= 1 && step <= run.steps) this.app.seek(step);
  }

  /**
   * Up and down; left and right are the page's own: one step back, one on.
   * @param {KeyboardEvent} event
   */
  key(event) {
    const { run, selected } = this.app;
    const by = KEY_ROWS[event.key];
    if (by === undefined || !run.ids.length) return false;
    const row = clamp(selected < 0 ? 0 : selected + by, 0, run.ids.length - 1);
    this.app.select(row);
    this.app.say((describeCell(run, row, run.step) ?? run.id(row)).replace(/\n/g, ", "));
    return true;
  }
}
