// What each request was asked and what it has answered so far, word by word.
// @ts-check
import { Chip } from "./chips.js";
import { STATES } from "./color.js";
import { element, setAttr, setText, sync } from "./dom.js";
import { cut, plural } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Beam, Output, Row, Run } from "./store.js" */

const MOST_ROWS = 24;
/** Words on the page of the picked request, or of all while the panel is enlarged; of others two lines are shown. */
const MOST_WORDS = 2000;
const FEW_WORDS = 80;
/** The first word moves on by so many at once. */
const WORDS_STRIDE = 40;
const MOST_PROMPT_SHOWN = 160;

export class TextPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.rows = element("div", { class: "cb-texts" });
    this.none = element("p", {
      class: "cb-empty",
      text: "The words of each request appear here as it is served.",
    });
    this.more = element("p", { class: "cb-note" });
    host.append(this.none, this.rows, this.more);
  }

  draw() {
    const { run } = this.app;
    const all = this.order();
    const shown = all.slice(0, MOST_ROWS);
    const over = all.length - shown.length;
    this.none.hidden = all.length > 0;
    setText(
      this.more,
      over > 0 ? `and ${plural(over, "request")} more: pick one in the timeline to read it` : "",
    );
    sync(this.rows, shown, {
      key: (row) => run.id(row),
      make: (row) => new TextRow(this.app, row),
      update: (textRow, row) => textRow.update(row),
    });
  }

  /** The picked request first, then who runs, was preempted, waits, has finished (the last one first). */
  order() {
    const { run, selected } = this.app;
    /** @type {Record<string, number[]>} */
    const groups = { running: [], preempted: [], waiting: [], finished: [], refused: [] };
    run.rows.forEach((request, row) => {
      if (!request) return;
      const hasText = request.outputs || request.status === "running" || row === selected;
      if (hasText) groups[request.status].push(row);
    });
    const { running, preempted, waiting, finished } = groups;
    finished.sort((a, b) => run.root[b] - run.root[a] || a - b);
    const all = [...running, ...preempted, ...waiting, ...finished];
    if (!all.includes(selected)) return all;
    return [selected, ...all.filter((row) => row !== selected)];
  }
}

class TextRow {
  /**
   * @param {App} app
   * @param {number} row
   */
  constructor(app, row) {
    const { prompt } = app.run.requests[row];
    const question = prompt ? cut(prompt.replace(/\s+/g, " "), MOST_PROMPT_SHOWN) : "";
    this.app = app;
    this.chip = new Chip(app, row);
    this.words = element("div", { class: "cb-words", dir: "auto" });
    this.search = element("span", { class: "cb-note" });
    this.node = element(
      "div",
      { class: "cb-textrow" },
      this.chip.node,
      element(
        "div",
        { class: "cb-said" },
        element(
          "div",
          {},
          question ? element("span", { class: "cb-asked", dir: "auto", text: question }) : null,
          this.words,
          this.search,
        ),
      ),
    );
    // What stands on the page: words `first` to `end` of a run's request, while its beam search was open or not.
    this.first = 0;
    this.end = 0;
    /** @type {Run | null} */
    this.run = null;
    this.open = false;
    /** @type {Element[]} words of the cursor's step */
    this.fresh = [];
  }

  /** @param {number} row */
  update(row) {
    const { run, selected } = this.app;
    const request = run.rows[row];
    if (!request) return;
    const beam = run.searching(row) ? run.beam(row) : null;
    const output = run.outputs[row];
    this.chip.update(row);
    this.node.classList.toggle("cb-picked", row === selected);
    this.node.classList.toggle("cb-lesser", !!beam && beam.place > 0);
    setAttr(this.node, "data-state", STATES[request.code]);
    setText(this.search, searchText(request, beam ?? outcome(request, output, row), !!beam));
    setAttr(this.search, "title", beam ? `log-probability ${beam.score.toFixed(2)}` : "");
    const whole = row === selected || this.app.isEnlarged("tokens");
    const end = beam ? beam.words.length : request.outputs;
    this.showWords(beam ?? output, end, whole ? MOST_WORDS : FEW_WORDS, !!beam);
  }

  /**
   * @param {Pick<Output, "words" | "steps">} text
   * @param {number} end
   * @param {number} most
   * @param {boolean} open the words may still become others
   */
  showWords(text, end, most, open) {
    const { run } = this.app;
    const first = Math.max(0, Math.floor((end - most) / WORDS_STRIDE) * WORDS_STRIDE);
    const anew = this.run !== run || this.first !== first || end < first || open || this.open !== open;
    if (anew) this.restart(run, first, open);
    for (; this.end > end; this.end--) this.words.lastChild?.remove();
    for (; this.end < end; this.end++) this.words.append(wordNode(text, this.end, end));
    this.markFresh(text, end);
  }

  /**
   * @param {Run} run
   * @param {number} first
   * @param {boolean} open
   */
  restart(run, first, open) {
    this.run = run;
    this.first = first;
    this.end = first;
    this.open = open;
    this.fresh = [];
    this.words.replaceChildren();
    if (first) this.words.append(element("span", { class: "cb-note", text: "… " }));
  }

  /**
   * Marks the words of the cursor's step.
   * @param {Pick<Output, "words" | "steps">} text
   * @param {number} end
   */
  markFresh({ steps }, end) {
    for (const word of this.fresh) word.classList.remove("cb-new");
    this.fresh = [];
    let word = this.words.lastElementChild;
    for (let i = end - 1; i >= this.first && steps[i] === this.app.run.step && word; i--) {
      word.classList.add("cb-new");
      this.fresh.push(word);
      word = word.previousElementSibling;
    }
  }
}

/**
 * @param {Pick<Output, "words" | "steps">} text
 * @param {number} i
 * @param {number} end
 */
function wordNode({ words, steps }, i, end) {
  const draft = i + 1 < end && steps[i + 1] === steps[i];
  return element("span", {
    class: draft ? "cb-drafted" : null,
    text: words[i],
    title: `token ${i + 1}, step ${steps[i]}${draft ? ", an accepted draft" : ""}`,
  });
}

/**
 * The outcome of a search that has ended stands in its beams' rows, best first.
 * @param {Row} request
 * @param {Output} output
 * @param {number} row
 * @returns {Pick<Beam, "place" | "of"> | null}
 */
function outcome(request, { search, endedAt }, row) {
  if (!endedAt || !request.outputs || !search) return null;
  const { rows } = search[0];
  return { place: rows.indexOf(row), of: rows.length };
}

/**
 * @param {Row} request
 * @param {Pick<Beam, "place" | "of"> | null} rank
 * @param {boolean} open
 */
function searchText(request, rank, open) {
  if (!rank) return "";
  const which = rank.place ? `beam ${rank.place + 1}` : "the best";
  const text = ` – ${which} of ${rank.of}`;
  if (!open) return text;
  const stopped = request.status === "finished";
  return `${text}${stopped ? " so far, stopped before the search ended" : " so far, not final"}`;
}
