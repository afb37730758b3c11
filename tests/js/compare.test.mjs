// The pure parts of the comparison: timelines on the clock, cursors beside each other, ticks.
import test from "node:test";
import assert from "node:assert/strict";
import { byClock, beside, baseOf, tickStep } from "../../cbviz/app/static/compare.js";
import { Timeline } from "../../cbviz/app/static/store.js";

const run = (t0, t1, rows) => {
  const tl = new Timeline(rows.length);
  rows.forEach((r, i) => r.forEach(([step, state]) => tl.push(i, step, state)));
  tl.t = t1.length + 1;
  return { tl, steps: t1.length, col: (n) => (n === "t0" ? t0 : t1) };
};

test("a timeline on the clock: a step twice as long is twice as wide, idle time keeps the state before it", () => {
  const R = run(
    [0, 1, 4],
    [1, 3, 5],
    [
      [
        [1, 1],
        [2, 2],
        [3, 3],
      ],
    ],
  );
  const tl = byClock(R, 0, 5, 501); // 100 ticks a second
  for (const [s, want] of [
    [0.5, 1],
    [1.2, 2],
    [2.9, 2],
    [3.5, 2],
    [4.5, 3],
  ]) {
    assert.equal(tl.at(0, 1 + 100 * s).state, want, `${s} s`);
  }
  assert.equal(tl.at(0, 400).state, 2);
  assert.equal(tl.at(0, 402).state, 3);
});

test("a finished tail begins where the last step ends, and an empty run is empty", () => {
  const tl = byClock(
    run(
      [0, 1],
      [1, 2],
      [
        [
          [1, 3],
          [3, 6],
        ],
      ],
    ),
    0,
    4,
    401,
  );
  assert.equal(tl.at(0, 200).state, 3);
  assert.equal(tl.t, 202);
  assert.equal(tl.at(0, 201).state, 6);
  assert.equal(byClock(run([], [], []), 0, 1).t, 1);
});

test("cursors: by step the same one, as far as a run goes; by time what the kernel worked out", () => {
  const runs = [{ steps: 5 }, { steps: 3 }];
  assert.deepEqual(beside(4, runs, null), [4, 3]);
  assert.deepEqual(beside(9, runs, null), [5, 3]);
  const table = [{ there: [0, 0, 1, 1, 2, 3], back: [0, 3, 4, 5] }];
  assert.deepEqual(beside(4, runs, table), [4, 2]);
  assert.equal(baseOf(1, 2, table), 4);
  assert.equal(baseOf(1, 2, null), 2);
  assert.equal(baseOf(0, 4, table), 4);
  for (let k = 0; k <= 3; k++) assert.equal(beside(baseOf(1, k, table), runs, table)[1], k, "there and back");
});

test("ticks are round and about six", () => {
  for (const top of [0.0134, 7, 10, 164, 1000, 54321]) {
    const d = tickStep(top);
    const n = top / d;
    assert.ok(n > 2 && n <= 6.01, `${top}: ${d}`);
    assert.ok([1, 2, 5].includes(Math.round(d / 10 ** Math.floor(Math.log10(d) + 1e-9))), `${d}`);
  }
});
