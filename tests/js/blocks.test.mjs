// The pool: two words a block, what they mean, and what is repainted.
import test from "node:test";
import assert from "node:assert/strict";
import { Blocks, CACHED, NULLBLOCK } from "../../cbviz/app/static/blocks.js";
import { gridColumns } from "../../cbviz/app/static/blockmap.js";

test("a block of 128 slots with 300 sharers survives packing", () => {
  const blocks = new Blocks(4, 128);

  blocks.apply([2, 70001, Blocks.pack(300, 128, CACHED)]);

  assert.equal(blocks.owner(2), 70000);
  assert.equal(blocks.refs(2), 300);
  assert.equal(blocks.fill(2), 128);
  assert.equal(blocks.flags(2), CACHED);
  assert.equal(blocks.kind(2), "shared");
});

test("the largest numbers of sharers and slots survive packing", () => {
  const blocks = new Blocks(4, 1024);

  blocks.apply([1, 1, Blocks.pack(65535, 1024, NULLBLOCK | CACHED)]);

  assert.equal(blocks.refs(1), 65535);
  assert.equal(blocks.fill(1), 1024);
  assert.equal(blocks.kind(1), "null");
});

test("kinds of blocks differ, and the null block is counted apart", () => {
  const blocks = new Blocks(6, 16);
  const changes = [
    [0, 0, Blocks.pack(0, 0, NULLBLOCK)],
    [1, 1, Blocks.pack(1, 16, CACHED)],
    [2, 1, Blocks.pack(1, 0, 0)],
    [3, 1, Blocks.pack(0, 16, CACHED)],
    [4, 2, Blocks.pack(3, 16, 0)],
  ];

  blocks.apply(changes.flat());

  const kinds = [0, 1, 2, 3, 4, 5].map((block) => blocks.kind(block));
  assert.deepEqual(kinds, ["null", "used", "reserved", "cached", "shared", "free"]);
  assert.deepEqual(blocks.counts(), { used: 3, shared: 1, reserved: 1, cached: 1, free: 1, total: 5 });
});

test("marks of the last step replace those before, and both cells are repainted", () => {
  const blocks = new Blocks(8);
  blocks.mark([1, 2]);
  blocks.dirty = new Set();

  blocks.mark([2, 5]);

  assert.deepEqual([...blocks.marked], [0, 0, 1, 0, 0, 1, 0, 0]);
  assert.deepEqual([...blocks.dirty].sort(), [1, 2, 5]);
});

for (const [numBlocks, width, height] of [
  [256, 380, 215],
  [4096, 1000, 300],
  [33, 340, 200],
  [512, 200, 400],
  [16384, 380, 215],
]) {
  test(`${numBlocks} blocks on ${width} x ${height}: columns are a multiple of 8, and no other gives larger cells`, () => {
    const cellWith = (columns) => Math.min(width / columns, height / Math.ceil(numBlocks / columns));

    const columns = gridColumns(numBlocks, width, height);

    assert.equal(columns % 8, 0);
    for (let other = 8; other < numBlocks + 8; other += 8) {
      assert.ok(cellWith(other) <= cellWith(columns) + 1e-9, `${other} columns would give larger cells`);
    }
  });
}

test("a pool of three blocks has at most three columns", () => {
  assert.ok(gridColumns(3, 300, 100) <= 3);
});
