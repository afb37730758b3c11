// The roofline: decode and prefill of each step as points under the machine's roof; the cursor's step ringed.
// Redrawn at most 5 times a second, and only while it is shown.
// @ts-check
import { Frame } from "./frame.js";
import { cut } from "./format.js";
import { PHASES, describePoint, pointsOf, ridgeOf, roofAt, whoWasComputed } from "./roofpoints.js";

/** @import { App } from "./page/state.js" */
/** @import { Phase, RoofPoint } from "./roofpoints.js" */
/** @import { Geometry, Place, PlotlyLibrary, PlotLayout, Theme } from "./page.js" */

/** Steps whose points are drawn. */
const ROOF_STEPS = 600;
const LEAST_ROOF_WAIT = 200;
const MOST_ROOF_WAIT = 3000;
/** CSS pixels from the mouse to a point that it means. */
const NEAR = 14;
export class RoofView {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(Plotly, host, app) {
    this.Plotly = Plotly;
    this.app = app;
    this.wait = LEAST_ROOF_WAIT;
    this.drawnAt = 0;
    this.timer = 0;
    /** @type {RoofPoint[]} */
    this.points = [];
    this.shown = false;
    this.frame = new Frame(Plotly, host, {
      role: "chart",
      label: "Roofline",
      markDirty: () => app.markDirty(),
      traces: (theme) => this.traces(theme),
      layout: () => this.axes(),
      paintOver: (_, context, geometry) => this.paintOver(context, geometry),
      click: (place) => {
        const point = this.near(place);
        if (point) app.seek(point.step);
      },
      hover: (place) => this.hover(place),
      restyle: (data, theme) => {
        data[0].line.color = theme.mute;
        PHASES.forEach(({ phase }, i) => {
          data[i + 1].marker.color = this.color(theme, phase);
        });
      },
    });
  }

  /**
   * @param {Theme} theme
   * @param {Phase} phase
   */
  color(theme, phase) {
    return phase === "both" ? theme.mute : theme.state[phase][0];
  }

  /** @param {Theme} theme */
  traces(theme) {
    const roof = {
      type: "scatter",
      mode: "lines",
      x: [],
      y: [],
      line: { width: 2, color: theme.mute },
      hoverinfo: "none",
    };
    const phases = PHASES.map(({ phase, symbol }) => ({
      type: "scatter",
      mode: "markers",
      x: [],
      y: [],
      marker: { size: 6, symbol, color: this.color(theme, phase), opacity: 0.65 },
      hoverinfo: "none",
    }));
    return [roof, ...phases];
  }

  /** @returns {PlotLayout} */
  axes() {
    const axis = {
      type: "log",
      fixedrange: true,
      showgrid: false,
      dtick: 1,
      tickformat: "~s",
      exponentformat: "SI",
    };
    return {
      margin: { l: 40, r: 8, t: 16, b: 30 },
      xaxis: { ...axis, title: { text: "operations a byte moved" } },
      yaxis: { ...axis, nticks: 4 },
    };
  }

  /** @param {boolean} shown */
  show(shown) {
    this.shown = shown;
    if (!shown) return;
    this.drawnAt = 0;
    this.advance();
  }

  advance() {
    if (!this.shown) return;
    this.frame.overDirty = true;
    if (!this.timer) this.drawIn(this.wait - (performance.now() - this.drawnAt));
  }

  /** @param {number} milliseconds */
  drawIn(milliseconds) {
    this.timer = setTimeout(() => this.draw(), Math.max(0, milliseconds));
  }

  draw() {
    this.timer = 0;
    if (!this.shown) return;
    if (!this.frame.ready) {
      this.drawIn(100);
      return;
    }
    const start = performance.now();
    this.points = this.readPoints();
    const { x, y } = this.edges();
    this.Plotly.update(this.frame.plot, this.lines(x), { "xaxis.range": x, "yaxis.range": y });
    this.drawnAt = performance.now();
    this.wait = Math.max(LEAST_ROOF_WAIT, Math.min(MOST_ROOF_WAIT, 10 * (this.drawnAt - start)));
    this.frame.repaintOver();
  }

  /** The points of the last steps, and of the cursor's if that is earlier. */
  readPoints() {
    const { step, steps } = this.app.run;
    const points = [];
    for (let i = Math.max(0, steps - ROOF_STEPS); i < steps; i++) {
      points.push(...pointsOf(this.app.run, i + 1));
    }
    if (step && step <= steps - ROOF_STEPS) points.push(...pointsOf(this.app.run, step));
    return points;
  }

  /** Ranges of the axes, as powers of ten: all points and the roof's ridge. */
  edges() {
    const x = this.points.map((point) => Math.log10(point.intensity));
    const y = this.points.map((point) => Math.log10(point.speed));
    const { run } = this.app;
    const ridge = ridgeOf(run);
    let lowest = 9;
    if (ridge) {
      x.push(Math.log10(ridge) - 1, Math.log10(ridge) + 0.7);
      y.push(Math.log10(run.meta.peak_flops_s));
      lowest = Math.log10(roofAt(run, 10 ** Math.min(...x)));
    }
    return {
      x: [Math.min(...x, 0) - 0.15, Math.max(...x, 1) + 0.15],
      y: [Math.min(...y, lowest) - 0.15, Math.max(...y, 10) + 0.2],
    };
  }

  /**
   * The roof and the points, as plotly wants them.
   * @param {number[]} edges of the axis of x, as powers of ten
   */
  lines([from, to]) {
    const { points } = this;
    const { run } = this.app;
    const ridge = ridgeOf(run);
    const peak = run.meta.peak_flops_s;
    const phases = PHASES.map(({ phase }) => points.filter((point) => point.phase === phase));
    return {
      x: [
        ridge ? [10 ** from, ridge, 10 ** to] : [],
        ...phases.map((list) => list.map((point) => point.intensity)),
      ],
      y: [
        ridge ? [roofAt(run, 10 ** from), peak, peak] : [],
        ...phases.map((list) => list.map((point) => point.speed)),
      ],
    };
  }

  /**
   * @param {Geometry} geometry
   * @param {RoofPoint} point
   */
  placeOf(geometry, point) {
    return [
      geometry.left + (Math.log10(point.intensity) - geometry.x0) * geometry.perX,
      geometry.top + (Math.log10(point.speed) - geometry.y0) * geometry.perY,
    ];
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paintOver(context, geometry) {
    const { run, theme } = this.app;
    const { left, top, width, height } = geometry;
    context.font = `11px ${theme.font}`;
    context.fillStyle = theme.mute;
    context.textBaseline = "alphabetic";
    if (!this.points.length) {
      const text = run.steps
        ? "the work of these steps is not known"
        : "the points appear with the first step";
      context.textAlign = "center";
      context.fillText(text, left + width / 2, top + height / 2);
      return;
    }
    const ridge = ridgeOf(run);
    if (ridge) this.paintRidge(context, geometry, ridge);
    if (run.step) this.paintCursorPoints(context, geometry);
  }

  /**
   * The line between the two limits, with their names as far as they fit.
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   * @param {number} ridge
   */
  paintRidge(context, geometry, ridge) {
    const { left, top, width, height } = geometry;
    const x = left + (Math.log10(ridge) - geometry.x0) * geometry.perX;
    const toLeft = x - left;
    const toRight = left + width - x;
    context.textAlign = "left";
    context.fillText("FLOP/s", 2, top - 4);
    context.textAlign = "right";
    if (toLeft > 90) {
      context.fillText(toLeft > 200 ? "← reading memory is the limit" : "← memory", x - 6, top - 4);
    }
    context.textAlign = "left";
    if (toRight > 60) {
      context.fillText(toRight > 140 ? "arithmetic is the limit →" : "arithmetic →", x + 6, top - 4);
    }
    context.strokeStyle = this.app.theme.line;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
    context.setLineDash([]);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paintCursorPoints(context, geometry) {
    const { run, theme } = this.app;
    context.lineWidth = 2;
    context.strokeStyle = theme.accent;
    context.fillStyle = theme.fg;
    for (const point of pointsOf(run, run.step)) {
      const [x, y] = this.placeOf(geometry, point);
      const atRight = x > geometry.left + geometry.width * 0.7;
      context.beginPath();
      context.arc(x, y, 7, 0, 7);
      context.stroke();
      context.textAlign = atRight ? "right" : "left";
      context.fillText(point.phase, x + (atRight ? -11 : 11), y + 4);
    }
  }

  /**
   * The point that the mouse means.
   * @param {Place | null} place
   */
  near(place) {
    if (!place || !this.frame.ready) return null;
    const geometry = this.frame.geometry();
    let best = null;
    let least = NEAR * NEAR;
    for (const point of this.points) {
      const [x, y] = this.placeOf(geometry, point);
      const distance = (x - place.px) ** 2 + (y - place.py) ** 2;
      if (distance > least) continue;
      least = distance;
      best = point;
    }
    return best;
  }

  /** @param {Place | null} place */
  hover(place) {
    const point = this.near(place);
    if (!place || !point) {
      this.frame.hideTip();
      return;
    }
    const { run } = this.app;
    const both = pointsOf(run, point.step).length > 1;
    const beside = both ? "\nbeside the other kind, in the step's whole time" : "";
    const words = describePoint(run, point).replace("; ", "\n");
    const who = cut(whoWasComputed(run, point).join(", "), 60);
    this.frame.showTip(place, `step ${point.step}, ${run.meta.clock}\n${words}${beside}\n${who}`);
  }

  destroy() {
    clearTimeout(this.timer);
    this.frame.destroy();
  }
}
