// What the page says in words: numbers, names, waits, points of the roofline.
import test from "node:test";
import assert from "node:assert/strict";
import { STATES } from "../../cbviz/app/static/color.js";
import { percent, seconds, shortId } from "../../cbviz/app/static/format.js";
import { waitText } from "../../cbviz/app/static/queue.js";
import { whoWasComputed } from "../../cbviz/app/static/roofpoints.js";

for (const [id, short] of [
  ["r12", "12"],
  ["r1.2", "1.2"],
  ["chat-007", "7"],
  ["anna", "ann"],
]) {
  test(`in a block's cell ${id} is ${short}`, () => assert.equal(shortId(id), short));
}

test("times and shares have about three digits and a unit", () => {
  assert.equal(seconds(0.0000806), "80.6 µs");
  assert.equal(seconds(2.5), "2.50 s");
  assert.equal(seconds(NaN), "–");
  assert.equal(percent(0.126), "13 %");
  assert.equal(percent(0.004), "0.4 %");
});

test("a point of the roofline names who decoded, with drafts or without", () => {
  const states = ["decode", "accepted", "prefill"];
  const run = {
    ids: ["a", "b", "c"],
    timeline: { at: (row) => ({ state: STATES.indexOf(states[row]) }) },
  };

  const who = (phase) => whoWasComputed(run, { phase, step: 1 });

  assert.deepEqual(who("decode"), ["a", "b"]);
  assert.deepEqual(who("prefill"), ["c"]);
  assert.deepEqual(who("both"), ["a", "b", "c"]);
});

test("a request of several sequences says how many seats it lacks", () => {
  const rows = [
    { wait: "seats", need: 3, have: 2 },
    { wait: "seats", need: 1, have: 0 },
  ];

  assert.equal(waitText({ rows }, 0), "its 3 sequences need a seat each, 2 free");
  assert.equal(waitText({ rows }, 1), "all seats are taken");
});
