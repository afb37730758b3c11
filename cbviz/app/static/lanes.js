// Bars of time in lanes, on a canvas as wide as its parent.
// @ts-check
import { contextOf } from "./dom.js";

/** @import { Profile } from "./messages.js" */
/** @import { Theme } from "./page.js" */

/**
 * A bar on the canvas, in CSS pixels, and what it stands for. `to`: as far as the mouse finds it, which is more for thin ones.
 * @typedef {{ lane: number, from: number, to: number, width: number, top: number, name: string, start: number, duration: number, note: string }} Bar
 */

const LANE_HEIGHT = 22;
const LANE_STRIDE = LANE_HEIGHT + 4;
/** CSS pixels beside the canvas. */
const LANE_MARGIN = 20;
/** CSS pixels from which on a bar has its name, or the start of it. */
const NAMED_BAR = 34;

/**
 * The bar under the mouse.
 * @param {Bar[]} bars
 * @param {number} x
 * @param {number} y
 */
export function barAt(bars, x, y) {
  return bars.find((bar) => x >= bar.from && x < bar.to && y >= bar.top && y < bar.top + LANE_HEIGHT);
}

/**
 * Paints a profile and returns where its bars lie.
 * @param {HTMLCanvasElement} canvas
 * @param {Profile} profile
 * @param {Theme} theme
 * @param {{ names: boolean }} options `names`: a lane whose bars are too short for their name has it beside them
 */
export function paintLanes(canvas, profile, theme, { names }) {
  const width = (canvas.parentElement?.clientWidth ?? 0) - LANE_MARGIN;
  const height = profile.lanes.length * LANE_STRIDE;
  const context = sized(canvas, width, height);
  context.font = `600 10px ${theme.font}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = theme.track;
  profile.lanes.forEach((_, lane) => context.fillRect(0, lane * LANE_STRIDE, width, LANE_HEIGHT));
  const bars = placeBars(profile, width);
  bars.forEach((bar, i) => paintBar(context, bar, profile, profile.name[i], theme));
  if (names) nameLanes(context, profile.lanes, bars, width, theme);
  return bars;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = contextOf(canvas);
  context.scale(ratio, ratio);
  return context;
}

/**
 * @param {Profile} profile
 * @param {number} width
 * @returns {Bar[]}
 */
function placeBars({ name, names, lane, start, duration, total, note }, width) {
  const end = Math.max(total, ...start.map((time, i) => time + duration[i]));
  const scale = width / end;
  return name.map((index, i) => {
    const from = start[i] * scale;
    const to = (start[i] + duration[i]) * scale;
    return {
      lane: lane[i],
      from,
      to: Math.max(to, from + 2),
      width: Math.max(to - from, 0.5),
      top: lane[i] * LANE_STRIDE,
      name: names[index],
      start: start[i],
      duration: duration[i],
      note: note ? note[i] : "",
    };
  });
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Bar} bar
 * @param {Profile} profile
 * @param {number} color
 * @param {Theme} theme
 */
function paintBar(context, bar, profile, color, theme) {
  const gap = bar.width > 3 ? 0.5 : 0;
  context.fillStyle = theme.owners.css[color & 255];
  context.fillRect(bar.from, bar.top, bar.width - gap, LANE_HEIGHT);
  const least = profile.note ? context.measureText(bar.name).width + 8 : NAMED_BAR;
  if (bar.width <= least) return;
  context.fillStyle = theme.owners.ink[color & 255];
  context.save();
  context.beginPath();
  context.rect(bar.from, bar.top, bar.width - 2, LANE_HEIGHT);
  context.clip();
  context.fillText(bar.name, bar.from + 3, bar.top + LANE_HEIGHT / 2);
  context.restore();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string[]} lanes
 * @param {Bar[]} bars
 * @param {number} width
 * @param {Theme} theme
 */
function nameLanes(context, lanes, bars, width, theme) {
  context.fillStyle = theme.mute;
  lanes.forEach((name, lane) => {
    const own = bars.filter((bar) => bar.lane === lane);
    const room = context.measureText(name).width + 8;
    if (own.some((bar) => bar.to - bar.from > room)) return;
    const from = Math.min(...own.map((bar) => bar.from));
    const to = Math.max(...own.map((bar) => bar.to));
    const x = to + room < width ? to + 4 : Math.max(3, from - room + 4);
    context.fillText(name, x, lane * LANE_STRIDE + LANE_HEIGHT / 2);
  });
}
