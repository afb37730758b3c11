// The points of the roofline, and what they say. Pure: no DOM.
// @ts-check
import { STATES } from "./color.js";
import { percent, rate, significant } from "./format.js";

/** @import { Run } from "./store.js" */

/** @typedef {"decode" | "prefill" | "both"} Phase */
/**
 * `intensity`: operations a byte moved; `speed`: operations a second.
 * @typedef {{ phase: Phase, step: number, intensity: number, speed: number }} RoofPoint
 */

/** @type {{ phase: Phase, flops: string, bytes: string, symbol: string }[]} the columns of each */
export const PHASES = [
  { phase: "decode", flops: "dflops", bytes: "dbytes", symbol: "circle" },
  { phase: "prefill", flops: "pflops", bytes: "pbytes", symbol: "diamond" },
  { phase: "both", flops: "flops", bytes: "bytes", symbol: "square" },
];
const PREFILL_STATES = new Set(["prefill", "recompute"]);
const DECODE_STATES = new Set(["decode", "accepted", "rejected"]);

/**
 * Operations a byte from which on arithmetic is the limit; 0: the peaks are not known.
 * @param {Run} run
 */
export function ridgeOf({ meta, peaksKnown }) {
  return peaksKnown ? meta.peak_flops_s / meta.peak_bytes_s : 0;
}

/**
 * Most operations a second.
 * @param {Run} run
 * @param {number} intensity
 */
export function roofAt({ meta }, intensity) {
  return Math.min(meta.peak_flops_s, intensity * meta.peak_bytes_s);
}

/**
 * The points of a step: decode and prefill where they are known apart, else the whole.
 * @param {Run} run
 * @param {number} step
 * @returns {RoofPoint[]}
 */
export function pointsOf(run, step) {
  const time = run.column("busy")[step - 1];
  if (!(time > 0)) return [];
  const all = PHASES.map(({ phase, flops, bytes }) => ({
    phase,
    step,
    intensity: run.column(flops)[step - 1] / run.column(bytes)[step - 1],
    speed: run.column(flops)[step - 1] / time,
  })).filter((point) => isFinite(point.intensity) && point.intensity > 0 && point.speed > 0);
  const apart = all.filter((point) => point.phase !== "both");
  return apart.length ? apart : all;
}

/**
 * Who was computed in a point's step, by what the timeline says of it.
 * @param {Pick<Run, "ids" | "id" | "timeline">} run
 * @param {Pick<RoofPoint, "phase" | "step">} point
 */
export function whoWasComputed(run, { phase, step }) {
  return run.ids.filter((_, row) => {
    const state = STATES[run.timeline.at(row, step)?.state ?? 0];
    const inPrefill = phase !== "decode" && PREFILL_STATES.has(state);
    const inDecode = phase !== "prefill" && DECODE_STATES.has(state);
    return inPrefill || inDecode;
  });
}

/**
 * @param {Run} run
 * @param {RoofPoint} point
 */
export function describePoint(run, point) {
  const ridge = ridgeOf(run);
  const limit = point.intensity < ridge ? "reading memory is the limit" : "arithmetic is the limit";
  return (
    `${point.phase}: ${rate(point.speed, "FLOP/s")}${shareOfRoof(run, point)}; ` +
    `${significant(point.intensity)} operations a byte${ridge ? `, so ${limit}` : ""}`
  );
}

/**
 * @param {Run} run
 * @param {RoofPoint} point
 */
function shareOfRoof(run, point) {
  const share = run.peaksKnown ? point.speed / roofAt(run, point.intensity) : 0;
  if (share > 1.02) return ", above the roof: measure the peaks again while nothing else runs";
  return share ? `, ${percent(share)} of the roof` : "";
}

/**
 * A step in words.
 * @param {Run} run
 * @param {number} step
 */
export function describeRoof(run, step) {
  const points = pointsOf(run, step);
  if (!points.length) return "the work of this step is not known";
  return points.map((point) => describePoint(run, point)).join("  ·  ");
}
