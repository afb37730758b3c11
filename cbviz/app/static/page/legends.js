// What the colours of the timeline and the shapes of the block map mean: those that have been seen.
// @ts-check
import { STATES, STATE_TEXT } from "../color.js";
import { contextOf, element } from "../dom.js";
import { paintTimeline } from "../raster.js";
import { Timeline } from "../segments.js";

/** @import { App } from "./state.js" */

/** CSS pixels of a sample. */
const SAMPLE_WIDTH = 22;
const SAMPLE_HEIGHT = 12;
/** The order in which states stand in the legend, and those that are always there. */
const ORDER = [1, 2, 3, 13, 14, 10, 4, 5, 7, 8, 9, 11, 12, 6];
const ALWAYS = [1, 2, 3, 4, 6];

export class Legends {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.states = element("div", { class: "cb-legend", role: "group", "aria-label": "Legend of states" });
    this.blocks = element("div", { class: "cb-legend", role: "group", "aria-label": "Legend of blocks" });
    this.seen = new Set(ALWAYS);
    this.reserved = false;
    this.fragments = false;
    this.sinkBlocks = 0;
  }

  /** After a picture: shows what is seen for the first time. */
  update() {
    const { run } = this.app;
    const before = this.key();
    for (const request of run.rows) {
      if (request?.code) this.seen.add(request.code);
      if (request?.wait === "fragments") this.fragments = true;
    }
    this.sinkBlocks = run.sinkBlocks;
    if (this.key() !== before) this.draw();
  }

  /** Blocks that are given out and hold no token yet. */
  sawReserved() {
    if (this.reserved) return;
    this.reserved = true;
    this.draw();
  }

  key() {
    return [this.seen.size, this.fragments, this.sinkBlocks].join();
  }

  draw() {
    const states = ORDER.filter((state) => this.seen.has(state));
    this.states.replaceChildren(
      ...states.map((state) =>
        element("span", { class: "cb-key" }, this.sample(state), STATE_TEXT[STATES[state]]),
      ),
    );
    this.blocks.replaceChildren(
      blockKey("cb-sw-used", "in use"),
      blockKey("cb-sw-part", "part full"),
      blockKey("cb-sw-shared", "shared"),
      ...(this.reserved ? [blockKey("cb-sw-reserved", "reserved")] : []),
      blockKey("cb-sw-cached", "cached"),
      blockKey("cb-sw-free", "free"),
      ...(this.fragments ? [blockKey("cb-sw-frag", "free, in too short a run")] : []),
      ...(this.sinkBlocks ? [blockKey("cb-sw-sink", "attention sink")] : []),
      blockKey("cb-sw-mark", "changed"),
    );
  }

  /**
   * A piece of timeline in one state.
   * @param {number} state
   */
  sample(state) {
    const ratio = devicePixelRatio || 1;
    const width = Math.round(SAMPLE_WIDTH * ratio);
    const height = Math.round(SAMPLE_HEIGHT * ratio);
    const canvas = element("canvas", {
      "aria-hidden": "true",
      width,
      height,
      style: `width:${SAMPLE_WIDTH}px;height:${SAMPLE_HEIGHT}px`,
    });
    const timeline = new Timeline(1);
    timeline.push(0, 1, state);
    timeline.end = 11;
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const view = { x0: 0.5, x1: 10.5, y0: -0.5, y1: 0.5 };
    paintTimeline(pixels, width, height, timeline, view, this.app.theme.states, ratio);
    contextOf(canvas).putImageData(image, 0, 0);
    return canvas;
  }
}

/**
 * @param {string} className
 * @param {string} text
 */
function blockKey(className, text) {
  return element(
    "span",
    { class: "cb-key" },
    element("i", { class: "cb-sw " + className, "aria-hidden": "true" }),
    text,
  );
}
