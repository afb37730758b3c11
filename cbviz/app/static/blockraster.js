// Paints the block map into an array of device pixels, where cells are small (below about 9 CSS pixels). Pure: no DOM.
// @ts-check
import { CACHED, NULLBLOCK } from "./blocks.js";

/** @import { GroundPixels, Owners, Window } from "./page.js" */
/** @import { Blocks } from "./blocks.js" */

/**
 * Where several blocks share a pixel the weightiest one is shown: shared, in use, cached, free.
 * @param {number} word the second word of a block
 */
function weightOf(word) {
  const refs = word >>> 16;
  if (refs > 1) return 3;
  if (refs) return 2;
  return word & CACHED ? 1 : 0;
}

/** Bits of the part of a cell that a pixel column or row belongs to. */
const RIM = 1;
const CORNER = 2;

/**
 * Pixels between cells.
 * @param {number} cell pixels of a cell's shorter side
 * @param {number} ratio
 */
function cellGap(cell, ratio) {
  if (cell >= 6 * ratio) return ratio;
  return cell >= 3 ? 1 : 0;
}

/**
 * @param {Uint32Array} pixels
 * @param {number} width
 * @param {number} height
 * @param {Blocks} blocks
 * @param {number} columns of the map
 * @param {Window} view
 * @param {Pick<Owners, "pixels" | "tintPixels">} owners
 * @param {GroundPixels} ground
 * @param {number} ratio device pixels a CSS pixel
 * @param {Uint8Array | null} dim blocks to dim
 */
export function paintBlocks(
  pixels,
  width,
  height,
  blocks,
  columns,
  view,
  owners,
  ground,
  ratio = 1,
  dim = null,
) {
  const { x0, y0 } = view;
  const perX = width / (view.x1 - x0);
  const perY = height / (view.y1 - y0);
  const { numBlocks, words } = blocks;
  const rows = Math.ceil(numBlocks / columns);
  const gap = cellGap(Math.min(perX, perY), ratio);
  const rim = Math.ceil(ratio);
  const dot = Math.max(2, Math.round(2 * ratio));
  const many = perX < 1 || perY < 1;
  pixels.fill(0, 0, width * height);

  // What each column of pixels shows: the map's column (-1: a gap), the last one where there are several, the part of the cell.
  const columnAt = new Int32Array(width);
  const lastColumnAt = new Int32Array(width);
  const partAt = new Uint8Array(width);
  for (let x = 0; x < width; x++) {
    const column = Math.floor(x0 + (x + 0.5) / perX + 0.5);
    const start = Math.round((column - 0.5 - x0) * perX);
    const end = Math.round((column + 0.5 - x0) * perX) - gap;
    columnAt[x] = column < 0 || column >= columns || x >= end ? -1 : column;
    lastColumnAt[x] = perX < 1 ? Math.min(columns - 1, Math.floor(x0 + (x + 1) / perX + 0.5)) : column;
    partAt[x] = (x < start + rim || x >= end - rim ? RIM : 0) | (x >= end - dot ? CORNER : 0);
  }

  /**
   * The weightiest block of a rectangle of the map.
   * @param {number} row
   * @param {number} lastRow
   * @param {number} column
   * @param {number} lastColumn
   */
  const weightiest = (row, lastRow, column, lastColumn) => {
    let best = row * columns + column;
    let weight = weightOf(words[2 * best + 1]);
    for (let r = row; r <= lastRow && weight < 3; r++) {
      for (let c = column; c <= lastColumn; c++) {
        const block = r * columns + c;
        if (block >= numBlocks) continue;
        const other = weightOf(words[2 * block + 1]);
        if (other <= weight) continue;
        weight = other;
        best = block;
      }
    }
    return best;
  };

  /**
   * @param {number} block
   * @param {number} x
   * @param {number} y
   * @param {number} part of the cell, in both directions
   */
  const colorOf = (block, x, y, part) => {
    const word = words[2 * block + 1];
    const refs = word >>> 16;
    const owner = (words[2 * block] - 1) & 255;
    if (word & NULLBLOCK) return gap && (x + y) % 3 === 0 ? ground.mutePx : ground.freePx;
    if (refs > 1 && gap && part & RIM) return ground.fgPx;
    if (refs) return dim && dim[block] ? owners.tintPixels[owner] : owners.pixels[owner];
    if (!(word & CACHED)) return ground.freePx;
    if (!gap) return owners.tintPixels[owner];
    return (x + y) & 1 ? owners.pixels[owner] : ground.bgPx;
  };

  for (let y = 0; y < height; y++) {
    const row = Math.floor(y0 + (y + 0.5) / perY + 0.5);
    if (row < 0 || row >= rows) continue;
    const start = Math.round((row - 0.5 - y0) * perY);
    const end = Math.round((row + 0.5 - y0) * perY) - gap;
    if (y >= end) continue;
    const lastRow = perY < 1 ? Math.min(rows - 1, Math.floor(y0 + (y + 1) / perY + 0.5)) : row;
    const rowPart = (y < start + rim || y >= end - rim ? RIM : 0) | (y < start + dot ? CORNER : 0);
    for (let x = 0; x < width; x++) {
      const column = columnAt[x];
      if (column < 0 || row * columns + column >= numBlocks) continue;
      const block = many ? weightiest(row, lastRow, column, lastColumnAt[x]) : row * columns + column;
      const corner = gap && partAt[x] & rowPart & CORNER && blocks.marked[block];
      pixels[y * width + x] = corner ? ground.markPx : colorOf(block, x, y, partAt[x] | rowPart);
    }
  }
}
