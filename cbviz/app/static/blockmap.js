// The pool, physical: one cell a block, coloured by owner. Shared, cached, free and just-changed blocks differ in shape, not only in colour.
// @ts-check
import { clamp } from "./color.js";
import { paintBlocks } from "./blockraster.js";
import { CellPainter } from "./blockcells.js";
import { paintBlocksOver } from "./blockover.js";
import { describeBlock, summarizeBlocks } from "./blockwords.js";
import { Frame } from "./frame.js";

/** @import { App } from "./page/state.js" */
/** @import { Geometry, Place, PlotlyLibrary, PlotLayout, Relayout } from "./page.js" */

/** CSS pixels beside and below the map, for its axes. */
const AXIS_WIDTH = 52;
const AXIS_HEIGHT = 32;
/** Cells smaller than this, or more cells than that, are painted pixel by pixel. */
const SMALL_CELL = 9;
const MANY_CELLS = 6000;

/**
 * Columns: a multiple of 8 where the pool has that many, so that the largest cells fit.
 * @param {number} numBlocks
 * @param {number} width
 * @param {number} height
 */
export function gridColumns(numBlocks, width, height) {
  const cell = (/** @type {number} */ columns) =>
    Math.min(width / columns, height / Math.ceil(numBlocks / columns));
  const few = numBlocks <= 8;
  const stride = few ? 1 : 8;
  const most = few ? numBlocks : numBlocks + 7;
  let best = Math.min(numBlocks, 8);
  for (let columns = stride; columns <= most; columns += stride) {
    if (cell(columns) > cell(best) + 1e-9) best = columns;
  }
  return best;
}

export class BlockView {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(Plotly, host, app) {
    this.app = app;
    /** The block that the keyboard stands on, and the one under the mouse; -1: none. */
    this.cursor = -1;
    this.hovered = -1;
    this.columns = 1;
    this.rows = 1;
    this.height = 0;
    /** @type {Set<number> | null} the blocks of the picked request */
    this.picked = null;
    /** The head of the queue waits though enough blocks are free: their runs are too short. */
    this.fragments = false;
    /** @type {Uint8Array} 1: not of the picked request */
    this.dim = new Uint8Array(0);
    /** @type {{ key: string, data: unknown[] } | null} what the canvas shows */
    this.painted = null;
    this.measure(host.clientWidth, host.clientHeight);
    this.frame = new Frame(Plotly, host, {
      role: "block map",
      label: "Map of KV blocks",
      scroll: true,
      markDirty: () => app.markDirty(),
      layout: () => this.axes(),
      home: () => this.home(),
      paint: (frame, context, geometry) => this.paint(frame, context, geometry),
      paintOver: (frame, context, geometry) => paintBlocksOver(frame, context, geometry, app, this),
      hover: (place) => this.hover(place),
      click: (place) => this.click(place),
      key: (event) => this.key(event),
      resized: (frame) => this.resized(frame),
    });
  }

  // axes -----------------------------------------------------------------------------------------------------

  /**
   * Chooses columns and rows for the room there is.
   * @param {number} width
   * @param {number} height
   */
  measure(width, height) {
    const { scale } = this.app.theme;
    const { numBlocks } = this.app.run.blocks;
    this.height = height || 240;
    this.columns = gridColumns(
      numBlocks,
      Math.max(80, (width || 400) - AXIS_WIDTH * scale),
      Math.max(60, this.height - AXIS_HEIGHT * scale),
    );
    this.rows = Math.ceil(numBlocks / this.columns);
  }

  /** @param {Frame} frame */
  resized(frame) {
    const before = this.columns;
    this.measure(frame.root.clientWidth, frame.root.clientHeight);
    if (before === this.columns) return;
    this.painted = null;
    const ticks = this.rowTicks();
    frame.setRange({
      ...this.home(),
      "xaxis.dtick": this.columnStride(),
      "yaxis.tickvals": ticks.tickvals,
      "yaxis.ticktext": ticks.ticktext,
    });
  }

  /** The first block of a row, as often as it fits. */
  rowTicks() {
    const { scale } = this.app.theme;
    let stride = 1;
    while ((this.rows / stride) * 14 * scale > this.height - AXIS_HEIGHT * scale) stride *= 2;
    const rows = [];
    for (let row = 0; row < this.rows; row += stride) rows.push(row);
    return {
      tickmode: "array",
      tickvals: rows,
      ticktext: rows.map((row) => String(row * this.columns)),
    };
  }

  columnStride() {
    if (this.columns < 8) return 1;
    let stride = 8;
    while (this.columns / stride > 12) stride *= 2;
    return stride;
  }

  /** @returns {PlotLayout} */
  axes() {
    const home = this.home();
    return {
      margin: { l: 42, r: 8, t: 4, b: 22 },
      xaxis: {
        range: home["xaxis.range"],
        showline: false,
        ticks: "",
        tick0: 0,
        dtick: this.columnStride(),
        tickformat: "d",
        tickprefix: "+",
        title: { text: "" },
      },
      yaxis: {
        range: home["yaxis.range"],
        ...this.rowTicks(),
        ticks: "",
        showline: false,
        scaleanchor: "x",
        scaleratio: 1,
      },
    };
  }

  /** @returns {Relayout} */
  home() {
    return { "xaxis.range": [-0.5, this.columns - 0.5], "yaxis.range": [this.rows - 0.5, -0.5] };
  }

  /**
   * The block at a place, or -1.
   * @param {Place} place
   */
  blockAt(place) {
    const column = Math.round(place.x);
    const row = Math.round(place.y);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    const block = row * this.columns + column;
    return block < this.app.run.blocks.numBlocks ? block : -1;
  }

  // painting -------------------------------------------------------------------------------------------------

  /**
   * @param {Frame} frame
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paint(frame, context, geometry) {
    const { blocks } = this.app.run;
    this.readSelection();
    const columns = geometry.x1 - geometry.x0;
    const rows = geometry.y1 - geometry.y0;
    const cell = Math.min(geometry.deviceWidth / columns, geometry.deviceHeight / rows) / geometry.ratio;
    const cells = Math.max(1, columns) * Math.max(1, rows);
    if (cell < SMALL_CELL || cells > MANY_CELLS) {
      this.paintPixels(frame, context, geometry);
      return;
    }
    const goesOn = this.goesOn(frame, geometry);
    const painter = new CellPainter(context, geometry, this.app, {
      cell,
      columns: this.columns,
      picked: this.picked,
      fragments: this.fragments,
    });
    if (goesOn && blocks.dirty) {
      for (const block of blocks.dirty) painter.repaint(block);
      blocks.dirty.clear();
      return;
    }
    context.clearRect(0, 0, geometry.deviceWidth, geometry.deviceHeight);
    blocks.dirty = new Set();
    const firstColumn = clamp(Math.floor(geometry.x0 + 0.5), 0, this.columns - 1);
    const lastColumn = clamp(Math.ceil(geometry.x1), 0, this.columns - 1);
    const firstRow = clamp(Math.floor(geometry.y0 + 0.5), 0, this.rows - 1);
    const lastRow = clamp(Math.ceil(geometry.y1), 0, this.rows - 1);
    for (let row = firstRow; row <= lastRow; row++) {
      for (let column = firstColumn; column <= lastColumn; column++) {
        const block = row * this.columns + column;
        if (block < blocks.numBlocks) painter.paint(block);
      }
    }
  }

  /** Which blocks are the picked request's, and whether free ones lie in too short runs. */
  readSelection() {
    const { run, selected } = this.app;
    const head = run.waiting.length ? run.rows[run.waiting[0]] : null;
    const fragments = head?.wait === "fragments";
    if (fragments !== this.fragments) {
      this.fragments = fragments;
      run.blocks.dirty = null;
    }
    const request = selected >= 0 ? run.rows[selected] : null;
    this.picked = request ? new Set(request.blocks) : null;
    this.picked?.delete(0); // the null block
  }

  /**
   * Whether only the blocks that changed need be painted.
   * @param {Frame} frame
   * @param {Geometry} geometry
   */
  goesOn(frame, geometry) {
    const { theme, run } = this.app;
    const { x0, x1, y0, y1, deviceWidth, deviceHeight, ratio } = geometry;
    const picked = this.picked ? [...this.picked].join(".") : "";
    const key = [x0, x1, y0, y1, deviceWidth, deviceHeight, ratio, picked].join();
    const before = this.painted;
    this.painted = { key, data: [theme, run.blocks] };
    const same = before?.key === key && before.data[0] === theme && before.data[1] === run.blocks;
    return same && !frame.fresh;
  }

  /**
   * @param {Frame} frame
   * @param {CanvasRenderingContext2D} context
   * @param {Geometry} geometry
   */
  paintPixels(frame, context, geometry) {
    const { theme, run } = this.app;
    const { deviceWidth, deviceHeight, ratio } = geometry;
    let dim = null;
    if (this.picked?.size) {
      if (this.dim.length !== run.blocks.numBlocks) this.dim = new Uint8Array(run.blocks.numBlocks);
      dim = this.dim.fill(1);
      for (const block of this.picked) dim[block] = 0;
    }
    paintBlocks(
      frame.pixels,
      deviceWidth,
      deviceHeight,
      run.blocks,
      this.columns,
      geometry,
      theme.owners,
      theme,
      ratio,
      dim,
    );
    context.putImageData(frame.image, 0, 0);
    this.painted = null;
  }

  // words, mouse and keys ------------------------------------------------------------------------------------

  summary() {
    return summarizeBlocks(this.app.run);
  }

  /** @param {Place | null} place */
  hover(place) {
    const block = place ? this.blockAt(place) : -1;
    if (place && block >= 0) this.frame.showTip(place, describeBlock(this.app.run, block, this.fragments));
    else this.frame.hideTip();
    if (block === this.hovered) return;
    this.hovered = block;
    this.frame.repaintOver();
  }

  /** @param {Place} place */
  click(place) {
    const block = this.blockAt(place);
    if (block < 0) return;
    this.cursor = block;
    this.choose(block);
  }

  /**
   * Selects the block's request, and asks why the block is what it is.
   * @param {number} block
   */
  choose(block) {
    this.app.select(this.requestOf(block));
    this.app.ask({ block });
  }

  /**
   * The row to select for a block: its owner; again and again on a shared block: its next holder.
   * @param {number} block
   */
  requestOf(block) {
    const { run, selected } = this.app;
    if (!run.blocks.refs(block)) return -1;
    const holders = run.holders(block);
    const at = holders.indexOf(selected);
    return at >= 0 ? holders[(at + 1) % holders.length] : run.blocks.owner(block);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const start = Math.max(0, this.cursor);
    if (event.key === "Enter") {
      this.choose(start);
      return true;
    }
    const columns = this.columns;
    const far = event.shiftKey ? 8 : 1;
    /** @type {Record<string, number>} */
    const moves = {
      ArrowLeft: -far,
      ArrowRight: far,
      ArrowUp: -columns,
      ArrowDown: columns,
      PageUp: -8 * columns,
      PageDown: 8 * columns,
    };
    const by = moves[event.key];
    if (by === undefined) return false;
    const { run } = this.app;
    this.cursor = this.cursor < 0 ? 0 : clamp(start + by, 0, run.blocks.numBlocks - 1);
    this.app.say(describeBlock(run, this.cursor, this.fragments).replace(/\n/g, ", "));
    this.frame.repaintOver();
    return true;
  }
}
