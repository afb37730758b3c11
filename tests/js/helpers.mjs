// What the tests of the page's modules are given.
import { ROW, SAME_BLOCKS } from "../../cbviz/app/static/store.js";

/** A buffer of 32-bit words, as a picture brings it. */
export const words = (values) => new DataView(Uint32Array.from(values).buffer);

/** A buffer of 64-bit floats. */
export const floats = (values) => new DataView(Float64Array.from(values).buffer);

/** A picture's head: an empty pool of 8 blocks, and what the test says. */
export const picture = (more) => ({
  num_blocks: 8,
  block_size: 16,
  series: ["t0", "t1", "sampled"],
  meta: { clock: "modelled" },
  steps: 0,
  step: 0,
  b: [],
  ...more,
});

/** A request as it arrives. */
export const request = (id, more) => ({ id, np: 5, mt: 9, pr: 0, at: 1, prompt: null, ...more });

export const RUNNING = 1;
export const FINISHED = 3;
export const REFUSED = 4;

/** The words of a request's row. `wait` is a number of the run's words; without `blocks` the table stays as it was. */
export function row(
  index,
  { state = 3, computed = 9, outputs = 0, wait = 0, status = RUNNING, blocks } = {},
) {
  const cached = 0;
  const preemptions = 0;
  const [need, have, end, host] = [0, 0, 0, 0];
  const table = blocks ? [blocks.length, ...blocks] : [SAME_BLOCKS];
  const before = [index, state, computed, cached, outputs, preemptions, wait, need, have, end, status, host];
  if (before.length + 1 !== ROW) throw new Error("a row has other words now");
  return [...before, ...table];
}

/** Numbers from 0 to 1 that are the same in each run of the tests. */
export function seededRandom(seed) {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
