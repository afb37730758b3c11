// Paints the timeline into an array of device pixels. Pure: no DOM, so testable in node. The cost is bounded by the screen and by
// the number of VISIBLE segments, never by requests x steps.
// @ts-check
import { RANK, STATES } from "./color.js";

/** @import { StatePixels, Window } from "./page.js" */
/** @import { Timeline } from "./segments.js" */

/** @typedef {(x: number, y: number) => boolean} Pattern */

// Textures by state, as a function of the pixel; true = the state's second colour. They are drawn from 2 px of bar height on.
const PERIOD = 12;
/** @type {Record<string, Pattern>} */
const PATTERN = {
  preempted: (x, y) => (x + y) % 6 < 2,
  swapped: (x, y) => y % 4 < 1,
  waiting: (x) => x % 4 === 1,
  recompute: (x, y) => (x + y) % 4 < 1,
  held: (x, y) => (x - y + 12) % 4 < 2,
  padded: (x, y) => x % 4 < 1 || y % 4 < 1,
  aborted: (x) => x % 4 < 2,
  transferring: (x) => x % 3 < 1,
  accepted: (x, y) => y % 3 < 1,
  rejected: (x, y) => x % 4 < 2 && y % 4 < 2,
};
// Part of the bar's height left empty above and below: thin bars are requests that do no work.
/** @type {Record<string, number>} */
const THIN = { waiting: 0.36, finished: 0.45, aborted: 0.4, idle: 0.25, held: 0.25 };

/**
 * @template Value
 * @param {Record<string, Value>} byState
 * @param {Value | null} none
 */
const byRank = (byState, none) => {
  const table = new Array(STATES.length).fill(none);
  for (const state in byState) table[RANK[STATES.indexOf(state)]] = byState[state];
  return table;
};
/** @type {(Pattern | null)[]} */
const PATTERNS = byRank(PATTERN, null);
/** @type {number[]} */
const INSET = byRank(THIN, 0);
/** Bit `rank` is set where the state of that rank has a texture. */
const TEXTURED = PATTERNS.reduce((bits, pattern, rank) => (pattern ? bits | (1 << rank) : bits), 0);
const RANK_FINISHED = RANK[STATES.indexOf("finished")];

/**
 * The textures at a size, as tiles of `period` by `period` pixels: 1 = the second colour.
 * @type {Map<number, { period: number, tiles: (Uint8Array | null)[] }>}
 */
const tilesBySize = new Map();

/** @param {number} size device pixels a pixel of the pattern */
function tilesFor(size) {
  const known = tilesBySize.get(size);
  if (known) return known;
  const period = PERIOD * size;
  const tiles = PATTERNS.map((pattern) => {
    if (!pattern) return null;
    const tile = new Uint8Array(period * period);
    for (let y = 0; y < period; y++) {
      for (let x = 0; x < period; x++) {
        tile[y * period + x] = pattern(Math.floor(x / size), Math.floor(y / size)) ? 1 : 0;
      }
    }
    return tile;
  });
  const made = { period, tiles };
  tilesBySize.set(size, made);
  return made;
}

/**
 * Pixels left empty above and below a bar, so that rows stay apart.
 * @param {number} height of the row
 * @param {number} ratio device pixels a CSS pixel
 */
function gapOf(height, ratio) {
  if (height >= 22 * ratio) return Math.round(3 * ratio);
  if (height >= 10 * ratio) return Math.round(1.5 * ratio);
  if (height >= 4 * ratio) return Math.ceil(0.5 * ratio);
  return 0;
}

/** One row of pixels: the highest rank in each column. Kept from call to call. */
let LINE = new Uint8Array(0);

/**
 * Paints the columns from `first` to `last` (the buffer then is that wide), so that a partial repaint is bit-equal to a full one.
 * Row r, step t covers [t - .5, t + .5] x [r - .5, r + .5].
 * @param {Uint32Array} pixels
 * @param {number} width
 * @param {number} height
 * @param {Timeline} timeline
 * @param {Window} view
 * @param {StatePixels} colors
 * @param {number} ratio device pixels a CSS pixel
 * @param {number} first
 * @param {number} last
 * @returns {number} how many segments were visited
 */
export function paintTimeline(
  pixels,
  width,
  height,
  timeline,
  view,
  colors,
  ratio = 1,
  first = 0,
  last = width,
) {
  const { plain, texture } = colors;
  const numRanks = plain.length;
  const { x0, y0 } = view;
  const perStep = width / (view.x1 - x0);
  const perRow = height / (view.y1 - y0);
  const stride = last - first;
  if (LINE.length < width) LINE = new Uint8Array(width);
  const line = LINE;
  pixels.fill(0, 0, stride * height);

  const columnOf = (/** @type {number} */ step) => Math.round((step - 0.5 - x0) * perStep);
  const within = (/** @type {number} */ column) => Math.max(first, Math.min(last, column));
  const firstStep = Math.max(0, Math.floor(x0 + 0.5 + (first - 1) / perStep));
  const recordedFrom = within(columnOf(1));
  const recordedTo = within(columnOf(timeline.end));

  let visited = 0;
  /** From this column on somebody has finished: a tail is kept as one number a pixel row. */
  let finishedFrom = last;
  /** Ranks on the line, as bits. */
  let ranks = 0;
  const clearLine = () => {
    line.fill(0, first, last);
    finishedFrom = last;
    ranks = 0;
  };

  /** @param {number} row */
  const addToLine = (row) => {
    const segments = timeline.rows[row];
    const length = timeline.lengths[row];
    if (!length) return;
    for (let i = Math.max(0, timeline.find(row, firstStep)); i < length; i++) {
      const rank = RANK[segments[i] & 31];
      const step = segments[i] >>> 5;
      if (step >= timeline.end) break;
      let from = columnOf(step);
      if (from >= last) break;
      visited++;
      if (!rank) continue;
      if (i + 1 === length && rank === RANK_FINISHED) {
        finishedFrom = Math.min(finishedFrom, Math.max(from, first));
        break;
      }
      let to = columnOf(i + 1 < length ? Math.min(timeline.end, segments[i + 1] >>> 5) : timeline.end);
      if (to <= from) to = from + 1; // never thinner than one pixel
      if (from < first) from = first;
      if (to > last) to = last;
      ranks |= 1 << rank;
      for (let column = from; column < to; column++) if (line[column] < rank) line[column] = rank;
    }
  };

  const { period, tiles } = tilesFor(Math.max(1, Math.round(ratio)));
  const shift = ((-Math.round(x0 * perStep) % period) + period) % period; // textures move with the steps
  const hasTrack = perRow >= 2 * ratio;
  const inset = new Int32Array(numRanks);
  const palette = new Uint32Array(numRanks);

  /**
   * A bar too low for textures: one row of pixels, copied.
   * @param {number} top
   * @param {number} bottom
   */
  const emitThin = (top, bottom) => {
    if (top >= bottom) return;
    const start = top * stride;
    for (let column = recordedFrom; column < recordedTo; column++) {
      const rank = line[column];
      const ground = hasTrack ? plain[0] : 0;
      pixels[start - first + column] = rank > 1 ? plain[rank] : ground;
    }
    for (let y = top + 1; y < bottom; y++) pixels.copyWithin(y * stride, start, start + stride);
  };

  /**
   * A bar with textures and with thin states.
   * @param {number} top of the bar, also where that lies above the picture
   * @param {number} bottom
   */
  const emitBar = (top, bottom) => {
    const bar = bottom - top;
    for (let rank = 0; rank < numRanks; rank++) {
      const most = Math.floor((bar - 1) / 2); // at least one row of pixels stays
      inset[rank] = bar < 3 * ratio ? 0 : Math.min(Math.floor(INSET[rank] * bar), most);
    }
    for (let y = Math.max(0, top); y < Math.min(height, bottom); y++) {
      const offset = y * stride - first;
      const depth = Math.min(y - top, bottom - 1 - y);
      for (let rank = 0; rank < numRanks; rank++) palette[rank] = plain[depth >= inset[rank] ? rank : 0];
      if (!(ranks & TEXTURED)) {
        for (let column = recordedFrom; column < recordedTo; column++) {
          pixels[offset + column] = palette[line[column]];
        }
        continue;
      }
      const tileRow = (y % period) * period;
      for (let column = recordedFrom; column < recordedTo; column++) {
        const rank = line[column];
        const tile = tiles[rank];
        const second = tile && depth >= inset[rank] && tile[tileRow + ((column + shift) % period)];
        pixels[offset + column] = second ? texture[rank] : palette[rank];
      }
    }
  };

  /**
   * @param {number} top
   * @param {number} bottom
   */
  const emitLine = (top, bottom) => {
    for (let column = finishedFrom; column < recordedTo; column++) {
      if (!line[column]) line[column] = RANK_FINISHED;
    }
    const gap = gapOf(bottom - top, ratio);
    if (bottom - top - 2 * gap >= 2 * ratio) emitBar(top + gap, bottom - gap);
    else emitThin(Math.max(0, top + gap), Math.min(height, bottom - gap));
    clearLine();
  };

  const firstRow = Math.max(0, Math.ceil(y0 - 0.5));
  const lastRow = Math.min(timeline.numRows - 1, Math.floor(view.y1 + 0.5));
  clearLine();
  if (perRow >= 1) {
    for (let row = firstRow; row <= lastRow; row++) {
      addToLine(row);
      emitLine(Math.round((row - 0.5 - y0) * perRow), Math.round((row + 0.5 - y0) * perRow));
    }
    return visited;
  }
  // Several rows on one row of pixels.
  let current = -1;
  for (let row = firstRow; row <= lastRow; row++) {
    const y = Math.min(height - 1, Math.max(0, Math.floor((row - y0) * perRow)));
    if (y !== current && current >= 0) emitLine(current, current + 1);
    current = y;
    addToLine(row);
  }
  if (current >= 0) emitLine(current, current + 1);
  return visited;
}
