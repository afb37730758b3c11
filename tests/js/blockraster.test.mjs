// The painter of small blocks writes into an array of pixels.
import test from "node:test";
import assert from "node:assert/strict";
import { paintBlocks } from "../../cbviz/app/static/blockraster.js";
import { Blocks, CACHED, NULLBLOCK } from "../../cbviz/app/static/blocks.js";
import { THEMES, ownerPalette } from "../../cbviz/app/static/color.js";

const COLUMNS = 128;
const CELL = 10;
const SLOTS = 128;
const [FREE, BACKGROUND, FOREGROUND, MUTE, MARK] = [1, 2, 3, 4, 5];
const ground = { freePx: FREE, bgPx: BACKGROUND, fgPx: FOREGROUND, mutePx: MUTE, markPx: MARK };
const owners = ownerPalette(THEMES.light);

/** 4,096 blocks: every third in use (every ninth shared), block 1 cached and free, block 2 the null block, block 3 marked. */
function manyBlocks() {
  const blocks = new Blocks(4096, SLOTS);
  for (let block = 0; block < blocks.numBlocks; block += 3) {
    const refs = block % 9 ? 1 : 300;
    blocks.apply([block, (block % 200) + 1, Blocks.pack(refs, SLOTS, 0)]);
  }
  blocks.apply([1, 8, Blocks.pack(0, SLOTS, CACHED)]);
  blocks.apply([2, 0, Blocks.pack(0, 0, NULLBLOCK)]);
  blocks.mark([3]);
  return blocks;
}

/** Paints them, and reads a pixel of a block's cell: its middle, or another one. */
function painted(blocks) {
  const width = COLUMNS * CELL;
  const rows = blocks.numBlocks / COLUMNS;
  const pixels = new Uint32Array(width * rows * CELL);
  const view = { x0: -0.5, x1: COLUMNS - 0.5, y0: -0.5, y1: rows - 0.5 };
  paintBlocks(pixels, width, rows * CELL, blocks, COLUMNS, view, owners, ground, 1);
  return (block, x = 4, y = 4) => {
    const top = Math.floor(block / COLUMNS) * CELL;
    const left = (block % COLUMNS) * CELL;
    return pixels[(top + y) * width + left + x];
  };
}

test("the middle of a cell has its owner's colour, or that of free blocks", () => {
  const blocks = manyBlocks();

  const pixel = painted(blocks);

  for (let block = 3; block < blocks.numBlocks; block++) {
    const wanted = blocks.refs(block) ? owners.pixels[block % 200] : FREE;
    assert.equal(pixel(block), wanted, `block ${block}`);
  }
});

test("a shared block has a rim, another one has none", () => {
  const pixel = painted(manyBlocks());

  assert.equal(pixel(9, 0, 4), FOREGROUND);
  assert.equal(pixel(12, 0, 4), owners.pixels[12]);
});

test("a block that the step changed has a corner, another one has none", () => {
  const pixel = painted(manyBlocks());

  assert.equal(pixel(3, 8, 0), MARK);
  assert.notEqual(pixel(6, 8, 0), MARK);
});

test("a block that is cached and free has dots of its last owner's colour", () => {
  const pixel = painted(manyBlocks());

  assert.deepEqual(new Set([pixel(1, 4, 4), pixel(1, 5, 4)]), new Set([BACKGROUND, owners.pixels[7]]));
});
