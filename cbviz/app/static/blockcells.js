// Draws single cells of the block map, where they are large enough for shapes and numbers.
// @ts-check
import { NULLBLOCK, CACHED } from "./blocks.js";
import { shortId } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Geometry } from "./page.js" */

/**
 * A cell on the canvas, in device pixels; `off`: it is not of the picked request.
 * @typedef {{ block: number, owner: number, left: number, top: number, right: number, bottom: number, width: number, height: number, off: boolean }} Cell
 */

/** CSS pixels of a cell from which on it has a number, and room for "×3" below it. */
const NUMBER_CELL = 14;
const COUNT_CELL = 26;
const LARGE_CELL = 22;

export class CellPainter {
  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   * @param {App} app
   * @param {{ cell: number, columns: number, picked: Set<number> | null, fragments: boolean }} map
   *   `cell`: CSS pixels of a cell's shorter side
   */
  constructor(context, geometry, app, { cell, columns, picked, fragments }) {
    this.context = context;
    this.geometry = geometry;
    this.run = app.run;
    this.theme = app.theme;
    this.cellSize = cell;
    this.columns = columns;
    this.picked = picked?.size ? picked : null;
    this.fragments = fragments;
    const { ratio } = geometry;
    this.perX = geometry.deviceWidth / (geometry.x1 - geometry.x0);
    this.perY = geometry.deviceHeight / (geometry.y1 - geometry.y0);
    this.gap = Math.max(1, Math.round(cell * 0.07 * ratio));
    this.radius = Math.round(Math.min(5, cell * 0.14) * ratio);
    this.fontSize = Math.min(14, Math.max(9, cell * 0.42)) * ratio;
    this.lineWidth = Math.max(1, Math.round(cell / 18)) * ratio;
    this.font = `600 ${this.fontSize}px ${app.theme.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = this.font;
  }

  /**
   * Where a block's cell lies; null: outside the picture.
   * @param {number} block
   * @returns {Cell | null}
   */
  place(block) {
    const { x0, y0, deviceWidth, deviceHeight } = this.geometry;
    const column = block % this.columns;
    const row = (block - column) / this.columns;
    const left = Math.round((column - 0.5 - x0) * this.perX);
    const right = Math.round((column + 0.5 - x0) * this.perX) - this.gap;
    const top = Math.round((row - 0.5 - y0) * this.perY);
    const bottom = Math.round((row + 0.5 - y0) * this.perY) - this.gap;
    if (right < 0 || bottom < 0 || left > deviceWidth || top > deviceHeight) return null;
    const owner = this.run.blocks.owner(block);
    const off = !!this.picked && !this.picked.has(block);
    return { block, owner, left, top, right, bottom, width: right - left, height: bottom - top, off };
  }

  /**
   * Paints over what was there. One pixel more is cleared: anti-aliasing may bleed into the gap.
   * @param {number} block
   */
  repaint(block) {
    const cell = this.place(block);
    if (!cell) return;
    this.context.clearRect(cell.left - 1, cell.top - 1, cell.width + 2, cell.height + 2);
    this.draw(cell);
  }

  /** @param {number} block */
  paint(block) {
    const cell = this.place(block);
    if (cell) this.draw(cell);
  }

  /** @param {Cell} cell */
  draw(cell) {
    const { blocks } = this.run;
    if (blocks.flags(cell.block) & NULLBLOCK) this.drawNull(cell);
    else if (blocks.refs(cell.block)) this.drawUsed(cell);
    else this.drawFree(cell);
    if (blocks.marked[cell.block]) this.drawMark(cell);
    this.context.globalAlpha = 1;
  }

  /**
   * A filled box with round corners.
   * @param {string} color
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   * @param {number | number[]} radius
   */
  fillBox(color, left, top, width, height, radius) {
    const { context } = this;
    context.fillStyle = color;
    context.beginPath();
    context.roundRect(left, top, width, height, radius);
    context.fill();
  }

  /**
   * Lines from a corner of the cell towards the opposite one; `inset` is the share left out at each end.
   * @param {Cell} cell
   * @param {string} color
   * @param {number} inset
   * @param {boolean} both a cross
   */
  strokeDiagonal(cell, color, inset, both) {
    const { context } = this;
    const left = cell.left + inset * cell.width;
    const right = cell.right - inset * cell.width;
    const top = cell.top + inset * cell.height;
    const bottom = cell.bottom - inset * cell.height;
    context.strokeStyle = color;
    context.lineWidth = Math.max(1, this.geometry.ratio);
    context.beginPath();
    if (both) {
      context.moveTo(left, top);
      context.lineTo(right, bottom);
      context.moveTo(right, top);
      context.lineTo(left, bottom);
    } else {
      context.moveTo(left, bottom);
      context.lineTo(right, top);
    }
    context.stroke();
  }

  /** @param {Cell} cell */
  drawNull(cell) {
    this.fillBox(this.theme.free, cell.left, cell.top, cell.width, cell.height, this.radius);
    this.strokeDiagonal(cell, this.theme.mute, 0.22, false);
  }

  /**
   * In use: as full as the cell is coloured; a shared block has a ring inside.
   * @param {Cell} cell
   */
  drawUsed(cell) {
    const { context, theme, radius } = this;
    const { blocks } = this.run;
    const { left, top, width, height, bottom, off } = cell;
    const color = cell.owner & 255;
    const fill = blocks.fill(cell.block);
    const full = fill >= blocks.blockSize;
    context.globalAlpha = off ? 0.28 : 1;
    this.fillBox(full ? theme.owners.css[color] : theme.owners.tint[color], left, top, width, height, radius);
    if (!full && fill) {
      const filled = Math.max(1, Math.round((height * fill) / blocks.blockSize));
      const upper = filled > height - radius ? radius : 0;
      const corners = filled < radius ? [0, 0, filled, filled] : [upper, upper, radius, radius];
      this.fillBox(theme.owners.css[color], left, bottom - filled, width, filled, corners);
    }
    if (blocks.refs(cell.block) > 1) this.drawRing(cell, full);
    if (this.cellSize >= NUMBER_CELL) this.drawNumber(cell, full);
  }

  /**
   * @param {Cell} cell
   * @param {boolean} full
   */
  drawRing(cell, full) {
    const { context, theme, cellSize } = this;
    const { ratio } = this.geometry;
    const large = cellSize >= LARGE_CELL;
    const inset = large ? Math.max(2 * ratio, cellSize * 0.1 * ratio) : 0.75 * ratio;
    context.strokeStyle = full && large ? theme.owners.ink[cell.owner & 255] : theme.fg;
    context.lineWidth = Math.max(this.lineWidth, 1.5 * ratio);
    context.beginPath();
    context.roundRect(
      cell.left + inset,
      cell.top + inset,
      cell.width - 2 * inset,
      cell.height - 2 * inset,
      Math.max(0, Math.round(this.radius - inset / 2)),
    );
    context.stroke();
  }

  /**
   * The owner's number; below it, on large cells, how many share the block.
   * @param {Cell} cell
   * @param {boolean} full
   */
  drawNumber(cell, full) {
    const { context, theme, fontSize } = this;
    const { left, top, width, height, off } = cell;
    const refs = this.run.blocks.refs(cell.block);
    context.fillStyle = full && !off ? theme.owners.ink[cell.owner & 255] : theme.fg;
    if (off) context.globalAlpha = 0.5;
    const number = shortId(this.run.id(cell.owner));
    const center = left + width / 2;
    if (refs <= 1 || this.cellSize < COUNT_CELL) {
      context.fillText(number, center, top + height / 2 + fontSize * 0.04, width * 0.86);
      return;
    }
    context.fillText(number, center, top + height * 0.43, width * 0.7);
    context.font = `600 ${fontSize * 0.62}px ${theme.font}`;
    context.fillText("×" + refs, center, top + height * 0.73, width * 0.7);
    context.font = this.font;
  }

  /**
   * Free; crossed out in a run that is too short; with dots in the last owner's colour while its tokens can be hit.
   * @param {Cell} cell
   */
  drawFree(cell) {
    const { context, theme } = this;
    context.globalAlpha = cell.off ? 0.5 : 1;
    this.fillBox(theme.free, cell.left, cell.top, cell.width, cell.height, this.radius);
    if (this.fragments) this.strokeDiagonal(cell, theme.bad, 0.32, true);
    if (this.run.blocks.flags(cell.block) & CACHED) this.drawDots(cell);
  }

  /** @param {Cell} cell */
  drawDots({ owner, left, top, width, height }) {
    const { context } = this;
    const step = Math.max(4, Math.round(this.cellSize / 5)) * this.geometry.ratio;
    const dot = Math.max(1, Math.round(step * 0.4));
    const across = Math.max(1, Math.floor((width - step * 0.6) / step));
    const down = Math.max(1, Math.floor((height - step * 0.6) / step));
    const firstX = Math.round(left + (width - (across - 1) * step - dot) / 2);
    const firstY = Math.round(top + (height - (down - 1) * step - dot) / 2);
    context.fillStyle = this.theme.owners.css[owner & 255];
    for (let i = 0; i < across; i++) {
      for (let j = 0; j < down; j++) context.fillRect(firstX + i * step, firstY + j * step, dot, dot);
    }
  }

  /**
   * Changed in this step: a corner.
   * @param {Cell} cell
   */
  drawMark({ right, top, width, off }) {
    const { context } = this;
    const size = Math.max(4 * this.geometry.ratio, Math.round(width * 0.3));
    context.globalAlpha = off ? 0.6 : 1;
    context.fillStyle = this.theme.mark;
    context.beginPath();
    context.moveTo(right - size, top);
    context.lineTo(right, top);
    context.lineTo(right, top + size);
    context.closePath();
    context.fill();
  }
}
