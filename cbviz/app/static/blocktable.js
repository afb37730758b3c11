// The picked request: its figures, its block table, its prompt.
// @ts-check
import { CACHED } from "./blocks.js";
import { STATES, STATE_TEXT } from "./color.js";
import { element, setAttr, setText, sync } from "./dom.js";
import { showFacts } from "./facts.js";
import { cut, grouped } from "./format.js";
import { isolated } from "./texts.js";

/** @import { App } from "./page/state.js" */
/** @import { Row } from "./store.js" */

/** @typedef {{ place: number, block: number }} Entry a place of the table, and the block that stands there; 0: none */

const MOST_ENTRIES = 400;
const MOST_PROMPT = 400;

export class TablePanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   * @param {HTMLElement} title of the panel
   * @param {HTMLButtonElement} abort
   */
  constructor(host, app, title, abort) {
    this.app = app;
    this.title = title;
    this.abort = abort;
    this.facts = element("dl", { class: "cb-facts" });
    this.cells = element("div", { class: "cb-cells" });
    this.none = element("p", {
      class: "cb-empty",
      text: "Pick a request: click its row in the timeline, one of its blocks, or its name anywhere.",
    });
    this.prompt = element("p", { class: "cb-note cb-prompttext", dir: "auto" });
    host.append(this.none, this.facts, this.cells, this.prompt);
  }

  draw() {
    const { run, selected } = this.app;
    const picked = selected >= 0;
    const request = picked ? run.rows[selected] : null;
    const prompt = picked ? run.requests[selected].prompt : null;
    setText(this.title, picked ? `Block table of ${isolated(run.id(selected))}` : "Block table");
    setText(this.prompt, prompt ? `“${cut(prompt, MOST_PROMPT)}”` : "");
    this.prompt.hidden = !prompt;
    this.none.hidden = picked;
    this.facts.hidden = !picked;
    this.cells.hidden = !request;
    this.drawAbort(request);
    if (request) {
      showFacts(this.facts, this.factsOf(request));
      this.drawTable(request);
    } else if (picked) {
      showFacts(this.facts, [{ name: "state", value: "not arrived" }]);
    }
  }

  /** @param {Row | null} request */
  drawAbort(request) {
    const { run, selected } = this.app;
    const ended = !request || request.status === "finished" || request.status === "refused";
    const past = run.step !== run.steps;
    this.abort.hidden = selected < 0;
    this.abort.disabled = ended || past;
    this.abort.title =
      request && past
        ? "Go to the last step first: an abort takes effect before the next one"
        : "Takes effect just before the next step";
  }

  /** @param {Row} request */
  factsOf(request) {
    const { run, selected } = this.app;
    const { np, mt, pr } = run.requests[selected];
    const state = STATE_TEXT[STATES[request.code]];
    const facts = [
      { name: "state", value: request.end ? `${state}: ${request.end}` : state },
      { name: "prompt", value: grouped(np) },
      { name: "output", value: `${grouped(request.outputs)} / ${grouped(mt)}` },
      { name: "computed", value: `${grouped(request.computed)} / ${grouped(np + request.outputs)}` },
    ];
    if (request.cached) facts.push({ name: "from cache", value: grouped(request.cached) });
    if (request.preemptions) facts.push({ name: "preempted", value: grouped(request.preemptions) + "×" });
    if (pr) facts.push({ name: "priority", value: String(pr) });
    const held = request.blocks.filter((block) => block > 0).length;
    const bytes = held * run.blocks.blockSize * (run.meta.kv_bytes || 0);
    if (bytes) facts.push({ name: "KV held", value: megabytes(bytes) });
    return facts;
  }

  /** @param {Row} request */
  drawTable(request) {
    /** @type {Entry[]} */
    const entries = Array.from(request.blocks.slice(0, MOST_ENTRIES), (block, place) => ({ place, block }));
    sync(this.cells, entries, {
      key: ({ place, block }) => `${place}>${block}`,
      make: (entry) => new TableCell(entry),
      update: (cell, entry) => cell.update(this.app, request, entry),
    });
  }
}

/** @param {number} bytes */
function megabytes(bytes) {
  if (bytes >= 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  return `${Math.max(1, Math.round(bytes / 1e3))} KB`;
}

class TableCell {
  /** @param {Entry} entry */
  constructor({ place, block }) {
    this.fill = "";
    this.sign = element("em");
    this.node = element(
      "span",
      { class: "cb-cell" },
      element("i", { text: place + ">" }),
      element("b", { text: block ? String(block) : "null" }),
      this.sign,
    );
  }

  /**
   * @param {App} app
   * @param {Row} request
   * @param {Entry} entry
   */
  update({ run }, request, { place, block }) {
    const { blocks, sinkBlocks, meta } = run;
    const size = blocks.blockSize;
    const refs = blocks.refs(block);
    const isSink = place < sinkBlocks;
    const tokens = `tokens ${place * size}–${(place + 1) * size - 1}`;
    this.node.classList.toggle("cb-shared", refs > 1);
    this.node.classList.toggle("cb-changed", !!blocks.marked[block]);
    this.node.classList.toggle("cb-gone", !block);
    this.setFill((request.computed - place * size) / size);
    const shared = refs > 1 ? `×${refs}` : "";
    setText(this.sign, isSink ? "sink" : shared);
    if (!block) {
      setAttr(this.node, "title", `${tokens} lie left of the window: their block was given back`);
      return;
    }
    const parts = [`${tokens} stand in block ${block}`];
    if (refs > 1) parts.push(`shared by ${refs} requests`);
    if (blocks.fill(block) < size) parts.push("not full");
    if (isSink) parts.push(`attention sinks: every query sees the first ${meta.sinks} tokens`);
    if (blocks.flags(block) & CACHED) parts.push("can be found by its hash");
    setAttr(this.node, "title", parts.join(", "));
  }

  /** @param {number} share computed of the place's tokens */
  setFill(share) {
    const fill = Math.round(100 * Math.min(1, Math.max(0, share))) + "%";
    if (this.fill === fill) return;
    this.fill = fill;
    this.node.style.setProperty("--fill", fill);
  }
}
