// The mouse on a figure that we draw ourselves: a drag moves it, the wheel zooms around the mouse, a double click is told.
// @ts-check
import { SvgAxis } from "./svgaxis.js";

/** @import { SvgFigure } from "./svgfigure.js" */

/** @typedef {Record<"xaxis" | "yaxis", number[]>} Ranges */

const DRAG_PX = 4;
/** Most pixels of one turn of the wheel, and pixels in which the range grows by a factor of e. */
const MOST_WHEEL = 100;
const WHEEL_PX = 500;

/** @param {SvgFigure} figure */
export function watchFigureMouse(figure) {
  const { host } = figure;
  /** @type {{ x: number, y: number, ranges: Ranges, moved: boolean } | null} */
  let drag = null;
  host.addEventListener("pointerdown", (event) => {
    if (event.button || !freeAxes(figure).length) return;
    const { xaxis, yaxis } = plotted(figure);
    const ranges = { xaxis: [...xaxis.range], yaxis: [...yaxis.range] };
    drag = { x: event.clientX, y: event.clientY, ranges, moved: false };
  });
  host.addEventListener("pointermove", (event) => {
    if (!drag || !(event.buttons & 1)) return;
    const right = event.clientX - drag.x;
    const down = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(right, down) < DRAG_PX) return;
    if (!drag.moved) host.setPointerCapture(event.pointerId);
    drag.moved = true;
    const { _size: area } = plotted(figure);
    const ranges = {
      xaxis: movedRange(drag.ranges.xaxis, -right / area.w),
      yaxis: movedRange(drag.ranges.yaxis, down / area.h),
    };
    setRanges(figure, ranges, "plotly_relayouting");
  });
  const end = () => {
    const moved = drag?.moved;
    drag = null;
    if (moved) figure.emit("plotly_relayout");
  };
  host.addEventListener("pointerup", end);
  host.addEventListener("pointercancel", end);
  host.addEventListener("dblclick", () => figure.emit("plotly_doubleclick"));
  host.addEventListener("wheel", (event) => zoom(figure, event), { passive: false });
}

/** @param {SvgFigure} figure */
function plotted({ host }) {
  if (!host._fullLayout) throw new Error("the figure has not been drawn yet");
  return host._fullLayout;
}

/**
 * Axes that may be moved.
 * @param {SvgFigure} figure
 */
function freeAxes({ layout }) {
  /** @type {("xaxis" | "yaxis")[]} */
  const axes = ["xaxis", "yaxis"];
  return axes.filter((name) => !layout[name].fixedrange);
}

/**
 * @param {number[]} range
 * @param {number} share of its width
 */
function movedRange(range, share) {
  const by = share * (range[1] - range[0]);
  return range.map((edge) => edge + by);
}

/**
 * @param {SvgFigure} figure
 * @param {Ranges} ranges
 * @param {string} event
 */
function setRanges(figure, ranges, event) {
  for (const name of freeAxes(figure)) {
    const axis = new SvgAxis({ ...figure.layout[name], range: ranges[name] });
    axis.keepInside();
    figure.layout[name] = { ...figure.layout[name], range: axis.range };
  }
  figure.draw();
  figure.emit(event);
}

/**
 * @param {SvgFigure} figure
 * @param {WheelEvent} event
 */
function zoom(figure, event) {
  if (!figure.config.scrollZoom || !freeAxes(figure).length) return;
  event.preventDefault();
  const { xaxis, yaxis, _size: area } = plotted(figure);
  const box = figure.host.getBoundingClientRect();
  const turn = Math.max(-MOST_WHEEL, Math.min(MOST_WHEEL, event.deltaY));
  const factor = Math.exp(turn / WHEEL_PX);
  const around = (/** @type {number[]} */ range, /** @type {number} */ value) =>
    range.map((edge) => value + (edge - value) * factor);
  const ranges = {
    xaxis: around(xaxis.range, xaxis.p2d(event.clientX - box.left - area.l)),
    yaxis: around(yaxis.range, yaxis.p2d(event.clientY - box.top - area.t)),
  };
  setRanges(figure, ranges, "plotly_relayout");
}
