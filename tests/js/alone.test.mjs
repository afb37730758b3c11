// The pure parts of the view "alone": shades by units in the last place, and which cell is meant.
import test from "node:test";
import assert from "node:assert/strict";
import { ulpShade, ULP_SHADES, cellAt, tiny } from "../../cbviz/app/static/alone.js";

test("equal, unknown and different never look alike, and a larger difference is never lighter", () => {
  assert.equal(ulpShade(0), 0);
  assert.equal(ulpShade(null), -1);
  const at = [1e-9, 0.25, 0.3, 0.5, 1, 1.5, 2, 4, 8, 9, 1e6].map(ulpShade);
  assert.deepEqual(at, [1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 7]);
  assert.equal(ULP_SHADES.length, 8);
  assert.equal(ULP_SHADES[ulpShade(1)], "1");
  assert.equal(ULP_SHADES[ulpShade(0)], "equal");
});
test("a place on the map is a layer and a position, and outside is nothing", () => {
  assert.deepEqual(cellAt(0, 0, 100, 30, 3, 10), [0, 0]);
  assert.deepEqual(cellAt(99.9, 29.9, 100, 30, 3, 10), [2, 9]);
  assert.deepEqual(cellAt(25, 10, 100, 30, 3, 10), [1, 2]);
  for (const [x, y] of [
    [-1, 5],
    [5, -1],
    [100, 5],
    [5, 30],
  ]) {
    assert.equal(cellAt(x, y, 100, 30, 3, 10), null);
  }
});
test("figures read well", () =>
  assert.deepEqual([0, 1.23456e-5, 0.0123456, 2].map(tiny), ["0", "1.2e-5", "0.0123", "2"]));
