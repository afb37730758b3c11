// Runs beside each other: timelines on the clock, and which steps stand beside which. Pure: no DOM.
// @ts-check
import { clamp } from "./color.js";
import { Timeline } from "./segments.js";

/** @import { StepTable } from "./messages.js" */
/** @import { Run } from "./store.js" */

/** Columns of a timeline on the clock. */
export const TICKS = 2000;

/**
 * 1, 2 or 5 times a power of ten, so that about six of them fit.
 * @param {number} top
 */
export function tickStep(top) {
  const raw = top / 6 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999) ?? 10 * power;
}

/**
 * A timeline on the clock instead of on steps. Of states shorter than a column the last one stays.
 * @param {Pick<Run, "timeline" | "steps" | "column">} run
 * @param {number} from seconds
 * @param {number} to
 * @param {number} [ticks] columns
 */
export function byClock(run, from, to, ticks = TICKS) {
  const { timeline, steps } = run;
  const begins = run.column("t0");
  const ends = run.column("t1");
  const onClock = new Timeline(timeline.numRows);
  /** @param {number} time */
  const tickOf = (time) => 1 + Math.floor(((ticks - 1) * (time - from)) / (to - from || 1));
  for (let row = 0; row < timeline.numRows; row++) {
    for (let i = 0; i < timeline.lengths[row]; i++) {
      const word = timeline.rows[row][i];
      const step = word >>> 5;
      const begin = step <= steps ? begins[step - 1] : ends[steps - 1];
      onClock.push(row, tickOf(begin), word & 31);
    }
  }
  onClock.end = steps ? tickOf(ends[steps - 1]) + 1 : 1;
  return onClock;
}

/**
 * The cursor of each run for a step of the first one.
 * @param {number} step
 * @param {{ steps: number }[]} runs
 * @param {StepTable[] | null} tables null: by step
 */
export function stepsBeside(step, runs, tables) {
  return runs.map((run, i) => {
    if (i === 0 || !tables) return clamp(step, 0, run.steps);
    return tables[i - 1].there[clamp(step, 0, runs[0].steps)];
  });
}

/**
 * The step of the first run beside a step of run `i`.
 * @param {number} i
 * @param {number} step
 * @param {StepTable[] | null} tables
 */
export function stepOfFirst(i, step, tables) {
  return i === 0 || !tables ? step : tables[i - 1].back[step];
}
