// The batch of one step: as one bar of tokens, whose they are (colour) and what they are for (texture of the strip below); and as a list.
// @ts-check
import { Chip } from "./chips.js";
import { contextOf, element, setText, sync } from "./dom.js";
import { cut, grouped, plural } from "./format.js";
import { isolated } from "./texts.js";

/** @import { App } from "./page/state.js" */
/** @import { Chunk } from "./store.js" */

export const KINDS = ["prefill", "decode", "recompute", "padded"];
const PADDED = KINDS.indexOf("padded");
/** CSS pixels of the strip of kinds, and of the space above it. */
const STRIP = 5;
const STRIP_GAP = 2;
/** CSS pixels from which on a part has its request's name. */
const NAMED_PART = 22;
const MOST_CHUNKS = 24;

export class BatchBar {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.canvas = element("canvas", { class: "cb-batchbar", role: "img", "aria-label": "Batch" });
    this.dirty = true;
    this.width = 0;
    this.height = 0;
    /** @type {{ from: number, to: number, chunk: Chunk }[]} where the parts lie, in CSS pixels */
    this.parts = [];
    this.sizes = new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.height = entry.contentRect.height;
      this.markDirty();
    });
    this.sizes.observe(this.canvas);
    this.canvas.addEventListener("click", (event) => {
      const chunk = this.chunkAt(event.offsetX);
      if (chunk) app.select(chunk.row);
    });
    this.canvas.addEventListener("mousemove", (event) => {
      const chunk = this.chunkAt(event.offsetX);
      this.canvas.title = chunk ? this.describe(chunk) : "";
    });
  }

  markDirty() {
    this.dirty = true;
    this.app.markDirty();
  }

  /** @param {number} x */
  chunkAt(x) {
    return this.parts.find((part) => x >= part.from && x < part.to)?.chunk ?? null;
  }

  /** @param {Chunk} chunk */
  describe({ row, start, tokens, kind }) {
    return `${this.app.run.id(row)}: ${tokens} ${KINDS[kind]}, positions ${start}–${start + tokens - 1}`;
  }

  /** Tokens by kind. */
  sums() {
    const { run } = this.app;
    const sums = KINDS.map(() => 0);
    for (const chunk of run.chunks) sums[chunk.kind] += chunk.tokens;
    sums[PADDED] += run.pad;
    return sums;
  }

  paint() {
    if (!this.dirty || !this.width) return;
    this.dirty = false;
    const { run, theme } = this.app;
    const { width, height } = this;
    const context = this.clear();
    const bar = height - STRIP - STRIP_GAP;
    const total = run.chunks.reduce((sum, chunk) => sum + chunk.tokens, 0) + run.pad;
    const budget = Math.min(run.config.budget || 0, Math.max(4 * total, 32));
    const shown = Math.max(total, budget || 1);
    const xOf = (/** @type {number} */ tokens) => Math.round((tokens / shown) * width);
    this.parts = [];
    context.fillStyle = theme.track;
    context.fillRect(0, 0, width, bar);
    let at = 0;
    for (const chunk of run.chunks) {
      const from = xOf(at);
      at += chunk.tokens;
      const to = Math.max(from + 1, xOf(at));
      this.parts.push({ from, to, chunk });
      this.paintPart(context, chunk, from, to, bar);
    }
    if (run.pad) {
      const from = xOf(at);
      const wide = Math.max(1, xOf(at + run.pad) - from);
      context.fillStyle = theme.state.padded[0];
      context.fillRect(from, 0, wide, bar);
      context.fillRect(from, bar + STRIP_GAP, wide, STRIP);
    }
  }

  /** An empty canvas of the right size, with the type for names. */
  clear() {
    const { canvas, width, height } = this;
    const ratio = devicePixelRatio || 1;
    const deviceWidth = Math.round(width * ratio);
    const deviceHeight = Math.round(height * ratio);
    if (canvas.width !== deviceWidth || canvas.height !== deviceHeight) {
      canvas.width = deviceWidth;
      canvas.height = deviceHeight;
    }
    const context = contextOf(canvas);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `600 11px ${this.app.theme.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    return context;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Chunk} chunk
   * @param {number} from
   * @param {number} to
   * @param {number} bar its height
   */
  paintPart(context, { row, kind }, from, to, bar) {
    const { run, theme, selected } = this.app;
    const gap = to - from > 4 ? 1 : 0;
    const wide = to - from - gap;
    context.fillStyle = theme.owners.css[row & 255];
    context.fillRect(from, 0, wide, bar);
    context.fillStyle = theme.state[KINDS[kind]][0];
    context.fillRect(from, bar + STRIP_GAP, wide, STRIP);
    if (row === selected) {
      context.strokeStyle = theme.accent;
      context.lineWidth = 2;
      context.strokeRect(from + 1, 1, Math.max(1, wide - 2), bar - 2);
    }
    if (to - from < NAMED_PART) return;
    const name = isolated(cut(run.id(row), Math.floor((to - from) / 7)));
    context.fillStyle = theme.owners.ink[row & 255];
    context.fillText(name, (from + to - gap) / 2, bar / 2 + 0.5);
  }

  summary() {
    const { run } = this.app;
    const sums = this.sums();
    const total = sums.reduce((sum, tokens) => sum + tokens, 0);
    if (!total) return "No batch";
    const kinds = KINDS.map((kind, i) => `${sums[i]} ${kind}`).join(", ");
    return `Batch of step ${run.step}: ${total} tokens of ${run.chunks.length} requests; ${kinds}`;
  }
}

/** @typedef {{ kind: string, tokens: number }} Sum */

export class BatchPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   * @param {BatchBar} bar
   * @param {HTMLElement} subtitle of the panel
   */
  constructor(host, app, bar, subtitle) {
    this.app = app;
    this.bar = bar;
    this.subtitle = subtitle;
    this.sums = element("div", { class: "cb-sums" });
    this.rows = element("div", { class: "cb-batchrows" });
    host.append(bar.canvas, this.sums, this.rows);
  }

  draw() {
    const { run } = this.app;
    const sums = KINDS.map((kind, i) => ({ kind, tokens: this.bar.sums()[i] }));
    this.bar.dirty = true;
    setText(this.subtitle, run.step ? this.title(sums) : "what a step computes for whom");
    const usual = ["prefill", "decode"];
    const shown = run.step ? sums.filter(({ kind, tokens }) => tokens || usual.includes(kind)) : [];
    sync(this.sums, shown, {
      key: (sum) => sum.kind,
      make: (sum) => new SumSign(sum),
      update: (sign, sum) => sign.update(this.app, sum),
    });
    sync(this.rows, run.chunks.slice(0, MOST_CHUNKS), {
      key: (chunk) => run.id(chunk.row),
      make: (chunk) => new ChunkRow(this.app, chunk),
      update: (row, chunk) => row.update(chunk),
    });
  }

  /** @param {Sum[]} sums */
  title(sums) {
    const { run } = this.app;
    const total = sums.reduce((sum, { tokens }) => sum + tokens, 0);
    const budget = run.config.budget ? ` of ${grouped(run.config.budget)}` : "";
    return `${plural(total, "token")}${budget}, ${plural(run.chunks.length, "request")}`;
  }
}

class SumSign {
  /** @param {Sum} sum */
  constructor({ kind }) {
    this.color = "";
    this.sign = element("i", { "data-kind": kind, "aria-hidden": "true" });
    this.tokens = element("b");
    this.node = element(
      "span",
      { class: "cb-sum" },
      this.sign,
      this.tokens,
      element("span", { text: " " + kind }),
    );
  }

  /**
   * @param {App} app
   * @param {Sum} sum
   */
  update({ theme }, { kind, tokens }) {
    const [color] = theme.state[kind];
    if (this.color !== color) {
      this.color = color;
      this.sign.style.background = color;
    }
    setText(this.tokens, grouped(tokens));
  }
}

class ChunkRow {
  /**
   * @param {App} app
   * @param {Chunk} chunk
   */
  constructor(app, { row }) {
    this.app = app;
    this.color = "";
    this.chip = new Chip(app, row);
    this.sign = element("i", { "aria-hidden": "true" });
    this.text = element("span");
    this.node = element("div", { class: "cb-batchrow" }, this.chip.node, this.sign, this.text);
  }

  /** @param {Chunk} chunk */
  update(chunk) {
    this.chip.update(chunk.row);
    const [color] = this.app.theme.state[KINDS[chunk.kind]];
    if (this.color !== color) {
      this.color = color;
      this.sign.style.background = color;
    }
    setText(this.text, chunkText(chunk));
  }
}

/** @param {Chunk} chunk */
function chunkText({ start, tokens, kind, drafts }) {
  const draftsText = drafts ? `${drafts} of them ${drafts > 1 ? "drafts" : "a draft"}, ` : "";
  const positions = tokens > 1 ? `positions ${start}–${start + tokens - 1}` : `position ${start}`;
  return `${grouped(tokens)} ${KINDS[kind]}, ${draftsText}${positions}`;
}
