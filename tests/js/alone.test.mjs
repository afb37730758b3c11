// The pure parts of the view "alone": shades by units in the last place, and which cell is meant.
import test from "node:test";
import assert from "node:assert/strict";
import { ulpShade, ULP_SHADES, cellAt, tiny } from "../../cbviz/app/static/alonemap.js";

const NOT_KNOWN = -1;

test("equal, unknown and different never look alike", () => {
  assert.equal(ulpShade(0), ULP_SHADES.indexOf("equal"));
  assert.equal(ulpShade(null), NOT_KNOWN);
  assert.equal(ulpShade(1e-9), ULP_SHADES.indexOf("≤ ¼"));
});

test("a larger difference is never lighter", () => {
  const differences = [1e-9, 0.25, 0.3, 0.5, 1, 1.5, 2, 4, 8, 9, 1e6];

  const shades = differences.map(ulpShade);

  assert.deepEqual(shades, [1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 7]);
  assert.equal(ULP_SHADES[ulpShade(1)], "1");
  assert.equal(ULP_SHADES.length, 8);
});

test("a place on the map is a layer and a position, and outside is nothing", () => {
  const at = (x, y) => cellAt(x, y, 100, 30, 3, 10);

  assert.deepEqual(at(0, 0), [0, 0]);
  assert.deepEqual(at(99.9, 29.9), [2, 9]);
  assert.deepEqual(at(25, 10), [1, 2]);
  assert.equal(at(-1, 5), null);
  assert.equal(at(5, -1), null);
  assert.equal(at(100, 5), null);
  assert.equal(at(5, 30), null);
});

test("small figures read well", () => {
  assert.deepEqual([0, 1.23456e-5, 0.0123456, 2].map(tiny), ["0", "1.2e-5", "0.0123", "2"]);
});
