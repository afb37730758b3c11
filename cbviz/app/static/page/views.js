// The four pictures that stand in plotly's frames: made with the first picture, and again where the pool or the peaks are others.
// @ts-check
import { BlockView } from "../blockmap.js";
import { RoofView } from "../roofline.js";
import { SeriesView } from "../series.js";
import { TimelineView } from "../timeline.js";

/** @import { PlotlyLibrary, Theme } from "../page.js" */
/** @import { App } from "./state.js" */

/** @typedef {{ timeline: HTMLElement, blocks: HTMLElement, series: HTMLElement, roofline: HTMLElement }} Hosts */

export class Views {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {Hosts} hosts
   * @param {App} app
   */
  constructor(Plotly, hosts, app) {
    this.app = app;
    this.key = Views.keyOf(app);
    this.timeline = new TimelineView(Plotly, hosts.timeline, app);
    this.blocks = new BlockView(Plotly, hosts.blocks, app);
    this.series = new SeriesView(Plotly, hosts.series, app);
    this.roofline = new RoofView(Plotly, hosts.roofline, app);
  }

  /**
   * What the views are built for: the number of blocks, and whether there are peaks.
   * @param {App} app
   */
  static keyOf({ run }) {
    return [run.blocks.numBlocks, run.peaksKnown].join();
  }

  get frames() {
    return [this.timeline.frame, this.blocks.frame, this.series.frame, this.roofline.frame];
  }

  /** @param {Theme} theme */
  async init(theme) {
    for (const frame of this.frames) await frame.init(theme);
  }

  /** @param {Theme} theme */
  async retheme(theme) {
    await Promise.all(this.frames.map((frame) => frame.retheme(theme)));
  }

  /**
   * After a picture.
   * @param {boolean} reset the run is another one
   */
  advance(reset) {
    this.timeline.advance();
    this.blocks.frame.underDirty = true;
    this.series.advance(reset);
    this.roofline.advance();
  }

  selectionChanged() {
    this.timeline.frame.overDirty = true;
    this.blocks.frame.underDirty = true;
  }

  destroy() {
    this.timeline.frame.destroy();
    this.blocks.frame.destroy();
    this.series.destroy();
    this.roofline.destroy();
  }
}
