// The pure parts of the comparison: timelines on the clock, cursors beside each other, ticks.
import test from "node:test";
import assert from "node:assert/strict";
import { byClock, stepsBeside, stepOfFirst, tickStep } from "../../cbviz/app/static/compareclock.js";
import { Timeline } from "../../cbviz/app/static/segments.js";

/** A run with one request: when its steps begin and end, and its segments [step, state]. */
function runOnClock(begins, ends, segments) {
  const timeline = new Timeline(1);
  for (const [step, state] of segments) timeline.push(0, step, state);
  timeline.end = ends.length + 1;
  return { timeline, steps: ends.length, column: (name) => (name === "t0" ? begins : ends) };
}

test("on the clock a step twice as long is twice as wide, and idle time keeps the state before it", () => {
  const segments = [
    [1, 1],
    [2, 2],
    [3, 3],
  ];
  const run = runOnClock([0, 1, 4], [1, 3, 5], segments);
  const ticksASecond = 100;

  const timeline = byClock(run, 0, 5, 5 * ticksASecond + 1);

  const stateAt = (time) => timeline.at(0, 1 + ticksASecond * time).state;
  assert.equal(stateAt(0.5), 1);
  assert.equal(stateAt(1.2), 2);
  assert.equal(stateAt(2.9), 2);
  assert.equal(stateAt(3.5), 2, "nothing runs from 3 s to 4 s");
  assert.equal(stateAt(4.5), 3);
  assert.equal(timeline.at(0, 400).state, 2);
  assert.equal(timeline.at(0, 402).state, 3);
});

test("a finished tail begins where the last step ends", () => {
  const segments = [
    [1, 3],
    [3, 6],
  ];

  const timeline = byClock(runOnClock([0, 1], [1, 2], segments), 0, 4, 401);

  assert.equal(timeline.at(0, 200).state, 3);
  assert.equal(timeline.end, 202);
  assert.equal(timeline.at(0, 201).state, 6);
});

test("an empty run is empty on the clock", () => {
  assert.equal(byClock(runOnClock([], [], []), 0, 1).end, 1);
});

test("by step the cursors stand at the same one, as far as a run goes", () => {
  const runs = [{ steps: 5 }, { steps: 3 }];

  assert.deepEqual(stepsBeside(4, runs, null), [4, 3]);
  assert.deepEqual(stepsBeside(9, runs, null), [5, 3]);
  assert.equal(stepOfFirst(1, 2, null), 2);
});

test("by time they stand where the kernel worked out, there and back", () => {
  const runs = [{ steps: 5 }, { steps: 3 }];
  const tables = [{ there: [0, 0, 1, 1, 2, 3], back: [0, 3, 4, 5] }];

  assert.deepEqual(stepsBeside(4, runs, tables), [4, 2]);
  assert.equal(stepOfFirst(1, 2, tables), 4);
  assert.equal(stepOfFirst(0, 4, tables), 4);
  for (let step = 0; step <= 3; step++) {
    const there = stepOfFirst(1, step, tables);
    assert.equal(stepsBeside(there, runs, tables)[1], step);
  }
});

for (const top of [0.0134, 7, 10, 164, 1000, 54321]) {
  test(`ticks up to ${top} are round, and three to six`, () => {
    const step = tickStep(top);

    const leading = Math.round(step / 10 ** Math.floor(Math.log10(step) + 1e-9));
    assert.ok(top / step > 2 && top / step <= 6.01, `a tick every ${step}`);
    assert.ok([1, 2, 5].includes(leading), `a tick every ${step}`);
  });
}
