// What the timeline says in words. Pure: no DOM.
// @ts-check
import { STATES, STATE_TEXT, clamp } from "./color.js";
import { grouped } from "./format.js";

/** @import { Geometry, Place } from "./page.js" */
/** @import { Timeline } from "./segments.js" */
/** @import { Run } from "./store.js" */

/**
 * A request at a step; null: not recorded.
 * @param {Run} run
 * @param {number} row
 * @param {number} step
 */
export function describeCell(run, row, step) {
  const cell = run.timeline.at(row, step);
  if (!cell) return null;
  const { np, mt } = run.requests[row];
  const lasts =
    cell.state && cell.end > cell.start ? `, steps ${grouped(cell.start)}–${grouped(cell.end - 1)}` : "";
  return (
    `${run.name(row)} · step ${grouped(step)}\n${STATE_TEXT[STATES[cell.state]]}${lasts}\n` +
    `prompt ${grouped(np)}, at most ${grouped(mt)} new tokens`
  );
}

/**
 * Many cells on one pixel: says so, with shares, instead of pretending that one cell is shown.
 * @param {Run} run
 * @param {Geometry} geometry
 * @param {Place} place
 * @returns {string | null} null: cells are larger than pixels
 */
export function digestCells(run, geometry, place) {
  const { timeline } = run;
  const { perX, perY } = geometry;
  if ((perY >= 0.75 && perX >= 0.75) || !timeline.numRows) return null;
  const firstRow = clamp(Math.floor(place.y - 0.5 / perY + 0.5), 0, timeline.numRows - 1);
  const lastRow = clamp(Math.ceil(place.y + 0.5 / perY - 0.5), firstRow, timeline.numRows - 1);
  const from = Math.max(1, Math.floor(place.x - 0.5 / perX + 0.5));
  const to = Math.max(from + 1, Math.ceil(place.x + 0.5 / perX));
  const numRows = lastRow - firstRow + 1;
  const all = numRows * (to - from);
  /** @type {string[]} */
  const parts = [];
  stepsByState(timeline, firstRow, lastRow, from, to).forEach((steps, state) => {
    if (!state || !steps) return;
    const share = steps / all;
    parts.push(`${STATE_TEXT[STATES[state]]} ${(100 * share).toFixed(share < 0.01 ? 2 : 0)}%`);
  });
  const who =
    numRows > 1 ? `${run.name(firstRow)}–${run.name(lastRow)} (${numRows} requests)` : run.name(firstRow);
  return `${who} · steps ${grouped(from)}–${grouped(to - 1)}\n${parts.join(", ") || "nothing"}`;
}

/**
 * How many steps of some rows were spent in each state.
 * @param {Timeline} timeline
 * @param {number} firstRow
 * @param {number} lastRow
 * @param {number} from first step
 * @param {number} to the step after the last
 */
function stepsByState(timeline, firstRow, lastRow, from, to) {
  const steps = new Float64Array(STATES.length);
  for (let row = firstRow; row <= lastRow; row++) {
    const segments = timeline.rows[row];
    const length = timeline.lengths[row];
    for (let i = Math.max(0, timeline.find(row, from)); i < length; i++) {
      const start = segments[i] >>> 5;
      if (start >= to) break;
      const end = i + 1 < length ? segments[i + 1] >>> 5 : timeline.end;
      const shown = Math.min(to, end) - Math.max(from, start);
      if (shown > 0) steps[segments[i] & 31] += shown;
    }
  }
  return steps;
}

/**
 * The picture in words.
 * @param {Run} run
 */
export function summarizeTimeline(run) {
  /** @type {Map<number, number>} */
  const numbers = new Map();
  for (const request of run.rows) {
    if (request) numbers.set(request.code, (numbers.get(request.code) ?? 0) + 1);
  }
  const states = [...numbers].map(([code, number]) => `${number} ${STATE_TEXT[STATES[code]]}`).join(", ");
  return (
    `Timeline, ${run.ids.length} requests, ${grouped(run.steps)} steps. ` +
    `At step ${run.step}: ${states || "nothing has arrived"}.`
  );
}
