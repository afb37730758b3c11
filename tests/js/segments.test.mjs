// The timeline's data: segments are found by step, and may be corrected.
import test from "node:test";
import assert from "node:assert/strict";
import { Timeline } from "../../cbviz/app/static/segments.js";

/** Row 0: state 1 from step 1, 12 from step 4 (corrected from 2), 3 from step 9; row 1 is empty; 11 steps. */
function twoRows() {
  const timeline = new Timeline(2);
  timeline.push(0, 1, 1);
  timeline.push(0, 4, 2);
  timeline.push(0, 4, 12);
  timeline.push(0, 9, 3);
  timeline.end = 12;
  return timeline;
}

test("a segment is found by any of its steps, and the last word of a step wins", () => {
  const timeline = twoRows();

  assert.equal(timeline.at(0, 3).state, 1);
  assert.equal(timeline.at(0, 4).state, 12);
  assert.deepEqual(timeline.at(0, 8), { state: 12, start: 4, end: 9 });
  assert.equal(timeline.at(0, 11).state, 3);
});

test("before the first segment is nothing, and outside the recording is no answer", () => {
  const timeline = twoRows();

  assert.equal(timeline.at(1, 5).state, 0);
  assert.equal(timeline.at(0, 12), null);
  assert.equal(timeline.at(0, 0), null);
  assert.equal(timeline.at(2, 1), null);
});

test("what is sent again changes nothing", () => {
  const timeline = twoRows();
  const before = timeline.lengths[0];

  timeline.push(0, 9, 3);

  assert.equal(timeline.lengths[0], before);
});

test("steps may be as high as 2^27", () => {
  const timeline = twoRows();

  timeline.push(0, 100000000, 5);
  timeline.end = 100000002;

  assert.equal(timeline.at(0, 100000001).state, 5);
});

test("a segment that was a view into a shared buffer can be corrected without touching its neighbour", () => {
  const segments = Uint32Array.of(1 * 32 + 1, 2 * 32 + 2, 1 * 32 + 3);
  const timeline = Timeline.fromPointers(Uint32Array.of(0, 2, 3), segments, 5);

  timeline.push(0, 2, 7);
  timeline.push(0, 3, 6);

  assert.equal(timeline.at(0, 2).state, 7);
  assert.equal(timeline.at(0, 4).state, 6);
  assert.equal(timeline.at(1, 4).state, 3);
  assert.equal(segments[1], 2 * 32 + 2, "the buffer itself is as it was");
});
