// The pure part of "Inside a step": a step's spans become lanes on one axis of time.
import test from "node:test";
import assert from "node:assert/strict";
import { moves } from "../../cbviz/app/static/inside.js";

test("the pass lies above, a lane for each kind of copy below, and a bar tells its blocks and its clock", () => {
  const spans = [
    ["swap-in", 0, 1, 2, 64],
    ["swap-out", 1, 4, 1, 32],
    ["pass", 1, 11, 0, 0],
    ["swap-out", 4, 5, 3, 96],
  ];

  const profile = moves({ clock: "modelled", spans });

  assert.deepEqual(profile.lanes, ["the pass", "swap-out: device to host", "swap-in: host to device"]);
  assert.deepEqual(profile.lane, [2, 1, 0, 1]);
  assert.deepEqual(profile.start, [0, 1, 1, 4]);
  assert.deepEqual(profile.duration, [1, 3, 10, 1]);
  assert.equal(profile.total, 11);
  assert.deepEqual(profile.note, [
    ", 2 blocks (modelled)",
    ", 1 block (modelled)",
    " (modelled)",
    ", 3 blocks (modelled)",
  ]);
});
