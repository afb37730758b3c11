// A figure drawn as SVG: axes, lines and markers; drag and wheel move it.
// @ts-check
import { SvgAxis } from "./svgaxis.js";
import { watchFigureMouse } from "./svgmouse.js";

/** @import { PlotlyElement, Relayout, Trace } from "./page.js" */
/** @import { AxisSpec } from "./svgaxis.js" */

/**
 * @typedef {{
 *   margin: { l: number, r: number, t: number, b: number }, font: { size: number, color: string, family: string },
 *   xaxis: AxisSpec, yaxis: AxisSpec, yaxis2?: AxisSpec,
 * }} FigureLayout
 *
 * A line or markers, in plotly's words.
 * @typedef {{
 *   mode: "lines" | "markers", x: (number | null)[], y: (number | null)[], yaxis?: string,
 *   line: { color: string, width: number, dash?: string },
 *   marker: { size?: number, symbol?: string, color?: string, opacity?: number },
 * }} FigureTrace
 *
 * Where an axis stands. `across`: length of the plot's other side; `side`: its place there; `outwards`: 1 or -1;
 * `margin`: room for the title.
 * @typedef {{ across: number, side: number, outwards: number, margin: number }} AxisPlace
 *
 * @typedef {Record<string, string | number | undefined>} SvgAttributes
 */

const SVG_SPACE = "http://www.w3.org/2000/svg";
/** Width of an average letter, in heights. */
const LETTER_WIDTH = 0.58;
/** @type {Record<string, (radius: number) => string>} outlines of markers */
const MARKERS = {
  circle: (r) => `m${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  diamond: (r) => `m0,${-1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
  square: (r) => `m${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
};

/**
 * @param {string} tag
 * @param {SvgAttributes} attributes
 * @param {string} [text]
 */
function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG_SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(name, String(value));
  }
  if (text !== undefined) made.textContent = text;
  return made;
}

export class SvgFigure {
  /**
   * @param {PlotlyElement} host
   * @param {FigureTrace[]} data
   * @param {FigureLayout} layout
   * @param {{ scrollZoom?: boolean }} config
   */
  constructor(host, data, layout, config) {
    this.host = host;
    this.data = data;
    this.layout = layout;
    this.config = config;
    /** @type {Map<string, (() => void)[]>} */
    this.listeners = new Map();
    host.on = (event, listener) => {
      this.listeners.set(event, [...(this.listeners.get(event) ?? []), listener]);
    };
    this.node = svg("svg", { style: "position:absolute;inset:0;width:100%;height:100%;display:block" });
    host.replaceChildren(this.node);
    watchFigureMouse(this);
    this.draw();
  }

  /** @param {string} event */
  emit(event) {
    for (const listener of this.listeners.get(event) ?? []) listener();
  }

  /**
   * Sets `xaxis.range` and the like.
   * @param {Relayout} updates
   */
  change(updates) {
    for (const [path, value] of Object.entries(updates)) {
      const [axis, name] = path.split(".");
      if (axis === "xaxis" || axis === "yaxis") this.layout[axis] = { ...this.layout[axis], [name]: value };
    }
    this.draw();
  }

  draw() {
    const { host, layout, data } = this;
    const { l, r, t, b } = layout.margin;
    const width = Math.max(1, host.clientWidth - l - r);
    const height = Math.max(1, host.clientHeight - t - b);
    const xaxis = new SvgAxis(layout.xaxis, width);
    const yaxis = new SvgAxis(layout.yaxis, height, true);
    const right = layout.yaxis2 ? new SvgAxis(layout.yaxis2, height, true) : null;
    if (layout.yaxis.autorange) yaxis.range = this.extent("y");
    if (right?.spec.autorange) right.range = this.extent("y2");
    if (layout.yaxis.scaleanchor) makeSquare(xaxis, yaxis);
    host.data = /** @type {Trace[]} */ (/** @type {unknown} */ (data));
    host._fullLayout = { _size: { l, t, w: width, h: height }, xaxis, yaxis };
    const body = svg("g", { transform: `translate(${l},${t})` });
    this.drawAxis(body, xaxis, { across: height, side: height, outwards: 1, margin: b });
    this.drawAxis(body, yaxis, { across: width, side: 0, outwards: -1, margin: l });
    if (right) this.drawAxis(body, right, { across: width, side: width, outwards: 1, margin: r });
    const clip = svg("svg", { x: 0, y: 0, width, height, overflow: "hidden" });
    for (const trace of data) drawTrace(clip, trace, xaxis, trace.yaxis === "y2" && right ? right : yaxis);
    body.append(clip);
    this.node.replaceChildren(body);
    this.emit("plotly_afterplot");
  }

  /**
   * From zero to a little over the largest value of the lines on an axis.
   * @param {string} axis
   * @returns {[number, number]}
   */
  extent(axis) {
    let most = 0;
    for (const trace of this.data) {
      if ((trace.yaxis || "y") !== axis) continue;
      for (const value of trace.y) if (value !== null && value > most && isFinite(value)) most = value;
    }
    return [0, most ? most * 1.06 : 1];
  }

  /**
   * Its line, ticks, labels, grid and title.
   * @param {Element} body
   * @param {SvgAxis} axis
   * @param {AxisPlace} place
   */
  drawAxis(body, axis, place) {
    const { spec, vertical, length } = axis;
    const { across, side, outwards } = place;
    const { font } = this.layout;
    const size = spec.tickfont?.size || font.size;
    const tick = spec.ticks === "" ? 0 : spec.ticklen || 0;
    const add = (/** @type {SvgAttributes} */ path) => body.append(svg("path", { fill: "none", ...path }));
    if (spec.showline) {
      add({ d: vertical ? `M${side},0V${length}` : `M0,${side}H${length}`, stroke: spec.linecolor });
    }
    for (const { value, label } of axis.ticks()) {
      const at = axis.d2p(value);
      if (!(at >= -1 && at <= length + 1)) continue;
      if (spec.showgrid) {
        add({ d: vertical ? `M0,${at}H${across}` : `M${at},0V${across}`, stroke: spec.gridcolor });
      }
      if (tick) {
        const d = vertical ? `M${side},${at}h${outwards * tick}` : `M${at},${side}v${tick}`;
        add({ d, stroke: spec.tickcolor });
      }
      const beside = {
        x: side + outwards * (tick + 3),
        y: at + size * 0.35,
        "text-anchor": outwards < 0 ? "end" : "start",
      };
      const below = { x: at, y: side + tick + size, "text-anchor": "middle" };
      const style = { fill: spec.color || font.color, "font-size": size, "font-family": font.family };
      body.append(svg("text", { ...(vertical ? beside : below), ...style }, label));
    }
    if (spec.title?.text) this.drawTitle(body, axis, place, spec.title.text);
  }

  /**
   * @param {Element} body
   * @param {SvgAxis} axis
   * @param {AxisPlace} place
   * @param {string} title
   */
  drawTitle(body, { spec, vertical, length }, { side, outwards, margin }, title) {
    const { font } = this.layout;
    const size = spec.title?.font?.size || font.size;
    const x = side + outwards * (margin - size * 0.5);
    const beside = { transform: `translate(${x},${length / 2}) rotate(-90)` };
    const below = { x: length / 2, y: side + margin - size * 0.35 };
    const attributes = {
      ...(vertical ? beside : below),
      "text-anchor": "middle",
      fill: spec.title?.font?.color || spec.color || font.color,
      "font-size": Math.min(size, length / (title.length * LETTER_WIDTH)),
      "font-family": font.family,
    };
    body.append(svg("text", attributes, title));
  }
}

/**
 * As many pixels a unit on both axes: the axis with more room shows more.
 * @param {SvgAxis} xaxis
 * @param {SvgAxis} yaxis
 */
function makeSquare(xaxis, yaxis) {
  const perUnit = (/** @type {SvgAxis} */ axis) => axis.length / Math.abs(axis.range[1] - axis.range[0]);
  const [wide, scale] = perUnit(xaxis) > perUnit(yaxis) ? [xaxis, perUnit(yaxis)] : [yaxis, perUnit(xaxis)];
  const [from, to] = wide.range;
  const half = ((wide.length / scale) * Math.sign(to - from)) / 2;
  const middle = (from + to) / 2;
  wide.range = [middle - half, middle + half];
}

/**
 * @param {Element} clip
 * @param {FigureTrace} trace
 * @param {SvgAxis} xaxis
 * @param {SvgAxis} yaxis
 */
function drawTrace(clip, trace, xaxis, yaxis) {
  const points = trace.x.map((x, i) => {
    const y = trace.y[i];
    if (x === null || y === null || !isFinite(y)) return null;
    return `${xaxis.d2p(x).toFixed(1)},${yaxis.d2p(y).toFixed(1)}`;
  });
  if (trace.mode === "lines") drawLine(clip, trace, points);
  else drawMarkers(clip, trace, points);
}

/**
 * @param {Element} clip
 * @param {FigureTrace} trace
 * @param {(string | null)[]} points null: a gap
 */
function drawLine(clip, { line }, points) {
  const d = points.map((point, i) => (point ? `${points[i - 1] ? "L" : "M"}${point}` : "")).join("");
  if (!d) return;
  const { color, width, dash = "" } = line;
  /** @type {Record<string, string>} */
  const dashes = { dot: `${width},${2 * width}`, dash: `${4 * width},${3 * width}` };
  const stroke = { stroke: color, "stroke-width": width, "stroke-dasharray": dashes[dash] };
  clip.append(svg("path", { d, fill: "none", ...stroke }));
}

/**
 * @param {Element} clip
 * @param {FigureTrace} trace
 * @param {(string | null)[]} points
 */
function drawMarkers(clip, { marker }, points) {
  const { size, symbol = "circle", color, opacity } = marker;
  if (!opacity || !size) return;
  const shape = (MARKERS[symbol] ?? MARKERS.circle)(size / 2);
  const d = points.map((point) => (point ? `M${point}${shape}` : "")).join("");
  if (d) clip.append(svg("path", { d, fill: color, opacity }));
}
