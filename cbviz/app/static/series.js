// Utilisation: two Plotly lines over steps, in a frame, with the cursor on the overlay. Redrawn at most 5 times a second.
// @ts-check
import { Frame } from "./frame.js";
import { percent, rate } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Geometry, Place, PlotlyLibrary, PlotLayout, Theme } from "./page.js" */

/** Least and most milliseconds between two drawings. */
const LEAST_WAIT = 200;
const MOST_WAIT = 3000;
/** Points that the lines keep. */
const MOST_POINTS = 6000;
/** Steps on screen: the first of these that holds all, or the last. */
const WIDTHS = [60, 120, 240, 480];
/** The signs of the lines, before their figures in words. */
const SIGNS = ["cb-line", "cb-line cb-dot", "cb-line cb-dash"];

export class SeriesView {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(Plotly, host, app) {
    this.Plotly = Plotly;
    this.app = app;
    /** Figures are shares of the peaks; else bytes and operations a second. */
    this.asShare = app.run.peaksKnown;
    /** Steps drawn, and when. */
    this.drawn = 0;
    this.drawnAt = 0;
    this.firstShown = 0;
    this.wait = LEAST_WAIT;
    this.timer = 0;
    /** The history was replaced: draw all lines anew. */
    this.replaced = false;
    this.frame = new Frame(Plotly, host, {
      role: "chart",
      label: "Utilisation by step",
      markDirty: () => app.markDirty(),
      traces: (theme) => this.traces(theme),
      layout: (theme) => this.axes(theme),
      paintOver: (_, context, geometry) => this.paintCursor(context, geometry),
      click: (place) => app.seek(Math.max(1, Math.min(app.run.steps, Math.round(place.x)))),
      hover: (place) => this.hover(place),
      restyle: (data, theme) => {
        data.forEach((trace, i) => {
          trace.line.color = i < 2 ? theme.lines[i] : theme.accent;
        });
      },
    });
  }

  /**
   * Bytes and operations a second of a step, and the share of it in which kernels ran; null: no time taken.
   * @param {number} step
   */
  ratesOf(step) {
    const { run } = this.app;
    const time = run.column("busy")[step - 1];
    if (!(time > 0)) return null;
    return {
      bytes: run.column("bytes")[step - 1] / time,
      flops: run.column("flops")[step - 1] / time,
      kernels: run.column("kernels")[step - 1],
    };
  }

  /**
   * The points of a step on the three lines.
   * @param {number} step
   */
  pointsOf(step) {
    const { run } = this.app;
    const { meta } = run;
    const rates = this.ratesOf(step);
    const kernels = this.asShare ? 100 * run.column("kernels")[step - 1] : NaN;
    if (!rates) return [null, null, kernels];
    if (!this.asShare) return [rates.bytes / 1e9, rates.flops / 1e9, kernels];
    return [(100 * rates.bytes) / meta.peak_bytes_s, (100 * rates.flops) / meta.peak_flops_s, kernels];
  }

  /** @param {Theme} theme */
  traces(theme) {
    const line = (/** @type {object} */ style, /** @type {object} */ more) => ({
      type: "scatter",
      mode: "lines",
      x: [],
      y: [],
      line: style,
      hoverinfo: "none",
      ...more,
    });
    const [bytes, flops] = theme.lines;
    return [
      line({ width: 1.6, color: bytes, dash: "solid" }, {}),
      line({ width: 1.6, color: flops, dash: "dot" }, this.asShare ? {} : { yaxis: "y2" }),
      line({ width: 1.2, color: theme.accent, dash: "dash" }, {}),
    ];
  }

  /**
   * @param {Theme} theme
   * @returns {PlotLayout}
   */
  axes(theme) {
    const margin = { l: 40, r: this.asShare ? 8 : 40, t: 4, b: 18 };
    const xaxis = { range: [0.5, 60.5], fixedrange: true, nticks: 5, tickformat: ",d" };
    const yaxis = {
      rangemode: "tozero",
      nticks: 4,
      showgrid: true,
      gridcolor: theme.line,
      showline: false,
      ticks: "",
      autorange: true,
      fixedrange: true,
    };
    if (this.asShare) return { margin, xaxis, yaxis: { ...yaxis, ticksuffix: "%" } };
    const titled = (/** @type {number} */ line, /** @type {string} */ text) => ({
      title: { text, font: { size: 10, color: theme.lines[line] }, standoff: 2 },
    });
    const right = {
      ...yaxis,
      ...titled(1, "GFLOP/s"),
      overlaying: "y",
      side: "right",
      showgrid: false,
      color: theme.mute,
      zeroline: false,
    };
    return { margin, xaxis, yaxis: { ...yaxis, ...titled(0, "GB/s") }, yaxis2: right };
  }

  /** How many steps are on screen. */
  width() {
    const { steps } = this.app.run;
    return WIDTHS.find((width) => steps <= width) ?? WIDTHS[WIDTHS.length - 1];
  }

  /** The steps on screen, from the first one's left edge: the last ones recorded, or where the cursor is if that is earlier. */
  from() {
    const { steps, step } = this.app.run;
    const width = this.width();
    const quarter = width / 4;
    const last = Math.max(0, Math.ceil(steps / quarter) * quarter - width);
    if (step > last) return last;
    return Math.max(0, Math.ceil(step / quarter) * quarter - 3 * quarter);
  }

  /**
   * The cursor moved, or something was added to the history.
   * @param {boolean} [reset] the history was replaced
   */
  advance(reset = false) {
    if (reset) this.drawn = 0;
    const outdated = reset || this.app.run.steps > this.drawn || this.from() !== this.firstShown;
    if (this.timer || !outdated) {
      this.frame.overDirty = true;
      return;
    }
    this.replaced = this.replaced || reset;
    this.drawIn(this.wait - (performance.now() - this.drawnAt));
  }

  /** @param {number} milliseconds */
  drawIn(milliseconds) {
    this.timer = setTimeout(() => this.draw(), Math.max(0, milliseconds));
  }

  draw() {
    this.timer = 0;
    if (!this.frame.ready) {
      this.drawIn(100);
      return;
    }
    const start = performance.now();
    this.extendLines();
    this.firstShown = this.from();
    const [left, right] = [this.firstShown + 0.5, this.firstShown + this.width() + 0.5];
    const { range } = this.frame.plotted.xaxis;
    if (range[0] !== left || range[1] !== right) this.frame.setRange({ "xaxis.range": [left, right] });
    this.replaced = false;
    this.drawn = this.app.run.steps;
    this.drawnAt = performance.now();
    // Lines never take more than about a tenth of the main thread.
    this.wait = Math.max(LEAST_WAIT, Math.min(MOST_WAIT, 10 * (this.drawnAt - start)));
  }

  extendLines() {
    const { steps } = this.app.run;
    const x = [];
    /** @type {(number | null)[][]} */
    const y = [[], [], []];
    for (let i = Math.max(this.replaced ? 0 : this.drawn, steps - MOST_POINTS); i < steps; i++) {
      x.push(i + 1);
      this.pointsOf(i + 1).forEach((value, line) => y[line].push(value));
    }
    const { plot } = this.frame;
    if (this.replaced) this.Plotly.restyle(plot, { x: [x, x.slice(), x.slice()], y });
    else if (x.length) this.Plotly.extendTraces(plot, { x: [x, x, x], y }, [0, 1, 2], MOST_POINTS);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paintCursor(context, geometry) {
    const { run, theme } = this.app;
    const { left, top, width, height } = geometry;
    const x = left + (run.step - geometry.x0) * geometry.perX;
    if (run.step < 1 || x < left || x > left + width) return;
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.8;
    context.fillRect(Math.round(x) - 0.5, top, 1.5, height);
    context.globalAlpha = 1;
  }

  /**
   * What is said of a step below the lines: figure by figure, behind the sign of its line; before the first step the lines' names.
   * @param {number} step
   * @returns {[sign: string, text: string][]}
   */
  parts(step) {
    const { meta } = this.app.run;
    const [solid, dotted, dashed] = SIGNS;
    if (step < 1) {
      return [
        [solid, "bytes/s"],
        [dotted, "FLOP/s"],
      ];
    }
    const rates = this.ratesOf(step);
    if (!rates) return [["", "no time taken"]];
    if (!isFinite(rates.bytes)) return [["", "the work of this step is not known"]];
    /**
     * @param {number} value
     * @param {number} peak
     */
    const share = (value, peak) => (this.asShare ? ` = ${percent(value / peak)}` : "");
    /** @type {[string, string][]} */
    const parts = [
      [solid, rate(rates.bytes, "B/s") + share(rates.bytes, meta.peak_bytes_s)],
      [dotted, rate(rates.flops, "FLOP/s") + share(rates.flops, meta.peak_flops_s)],
    ];
    if (rates.kernels > 0) parts.push([dashed, `kernels ran ${percent(rates.kernels)}`]);
    if (this.abovePeak(step)) {
      parts[parts.length - 1][1] +=
        ". Above the peak: it was measured while the machine was busy; measure it again";
    }
    return parts;
  }

  /**
   * A peak that a step passes was measured while something else had the machine.
   * @param {number} step
   */
  abovePeak(step) {
    const { meta } = this.app.run;
    const rates = this.ratesOf(step);
    if (!rates || !this.asShare || !meta.peaks_measured || meta.clock === "modelled") return false;
    return Math.max(rates.bytes / meta.peak_bytes_s, rates.flops / meta.peak_flops_s) > 1.1;
  }

  /** @param {Place | null} place */
  hover(place) {
    const { run } = this.app;
    const step = place ? Math.round(place.x) : 0;
    if (!place || step < 1 || step > run.steps) {
      this.frame.hideTip();
      return;
    }
    const text = this.parts(step)
      .map((part) => part[1])
      .join(", ");
    this.frame.showTip(place, `step ${step}, ${run.meta.clock}\n${text.replace(", ", "\n")}`);
  }

  destroy() {
    clearTimeout(this.timer);
    this.frame.destroy();
  }
}
