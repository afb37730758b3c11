// Two to four runs side by side: their timelines with linked cursors, their figures, where the schedules part and why, and whether the outputs are equal.
// @ts-check
import { clamp } from "./color.js";
import { TICKS, stepOfFirst, stepsBeside } from "./compareclock.js";
import { Lane, spanOf } from "./comparelanes.js";
import { metricsTable, pairSection } from "./comparetable.js";
import { element, setAttr, setText, sync } from "./dom.js";
import { cut } from "./format.js";
import { errorLine, showError } from "./popover.js";
import { Run, namedBuffers } from "./store.js";

/** @import { App } from "./page/state.js" */
/** @import { Branch, Compared, ComparedRun, Family, FilesMessage, Said, SavedFile } from "./messages.js" */

const MOST_RUNS = 4;
const LEAST_COLUMNS = 10;
/** What can be picked: "branch:NAME" or "file:ID". */
const BRANCH = "branch:";
const FILE = "file:";

export class ComparePanel {
  /**
   * @param {App} app
   * @param {HTMLElement} host
   */
  constructor(app, host) {
    this.app = app;
    this.host = host;
    this.open = false;
    /** @type {string[]} */
    this.picks = [];
    /** @type {SavedFile[]} */
    this.files = [];
    /** @type {Branch[]} */
    this.branches = [];
    /** Name of the branch on the page. */
    this.branch = "";
    /** @type {Compared | null} the comparison that is shown, its runs and their lanes */
    this.data = null;
    /** @type {Run[]} */
    this.runs = [];
    /** @type {Lane[]} */
    this.lanes = [];
    /** @type {{ data: Compared, runs: Run[] } | null} the one that is coming */
    this.coming = null;
    this.pending = false;
    this.dirty = false;
    /** The cursor: a step of the first run. */
    this.at = 0;
    this.byTime = false;
    this.chips = element("div", { class: "cb-chips" });
    this.fileSelect = element("select", {
      class: "cb-cmp-file",
      "aria-label": "Add a saved run",
      onchange: () => {
        if (this.fileSelect.value) this.togglePick(FILE + this.fileSelect.value);
        this.fileSelect.value = "";
      },
    });
    this.timeOption = element("option", { value: "time", text: "by time" });
    this.alignSelect = element(
      "select",
      {
        class: "cb-cmp-align",
        "aria-label": "Align the cursors by",
        onchange: () => {
          this.byTime = this.alignSelect.value === "time";
          this.dirty = true;
          this.draw();
        },
      },
      element("option", { value: "step", text: "by step" }),
      this.timeOption,
    );
    this.scrub = element("input", {
      type: "range",
      class: "cb-cmp-scrub",
      min: 0,
      value: 0,
      "aria-label": "Step of the first run; the others follow",
      oninput: () => this.go(Number(this.scrub.value)),
    });
    this.error = errorLine("cb-cmp-error");
    this.laneBox = element("div", { class: "cb-lanes" });
    this.table = element("table", { class: "cb-cmptable" });
    this.notes = element("p", { class: "cb-note" });
    this.pairs = element("div", { class: "cb-pairs" });
    const cursor = element("span", { text: "cursor" });
    this.results = element(
      "div",
      { class: "cb-cmpafter", hidden: true },
      element("label", { class: "cb-cmpscrub" }, cursor, this.scrub, this.alignSelect),
      element("div", { class: "cb-cmpcols" }, element("div", {}, this.table, this.notes), this.pairs),
    );
    host.append(
      element("div", { class: "cb-cmppicks" }, this.chips, this.fileSelect),
      this.error,
      this.laneBox,
      this.results,
    );
    this.sizes = new ResizeObserver(() => {
      this.dirty = true;
      this.paint();
    });
    this.sizes.observe(this.laneBox);
  }

  /** @param {boolean} open */
  show(open) {
    this.open = open;
    if (!open) return;
    this.app.send("files");
    this.pickDefaults();
    this.ask();
  }

  // which runs -----------------------------------------------------------------------------------------------

  /** Picks that are gone are dropped; too few: the page's branch and its parent. */
  pickDefaults() {
    const names = this.branches.map((branch) => branch.name);
    this.picks = this.picks.filter(
      (pick) => pick.startsWith(FILE) || names.includes(pick.slice(BRANCH.length)),
    );
    if (this.picks.length < 2) {
      const here = this.branches.find((branch) => branch.shown);
      const wanted = [here?.parent, here?.name, ...names].filter((name) => name && names.includes(name));
      this.picks = [...new Set(wanted)].slice(0, 2).map((name) => BRANCH + name);
    }
    this.drawPicks();
  }

  /** @param {Family} family */
  family({ name, branches }) {
    this.branches = branches;
    this.branch = name;
    if (!this.open) return;
    this.pickDefaults();
    if (!this.runs.length) this.ask();
  }

  /** @param {FilesMessage} message */
  saved({ files }) {
    this.files = files;
    const first = files.length ? "add a saved run …" : "no saved runs";
    this.fileSelect.replaceChildren(
      element("option", { value: "", text: first }),
      ...files.map(({ id, label }) => element("option", { value: id, text: cut(label, 60) })),
    );
    this.fileSelect.disabled = !files.length;
  }

  drawPicks() {
    const branches = this.branches.map(({ name }) => ({ pick: BRANCH + name, name }));
    const files = this.picks
      .filter((pick) => pick.startsWith(FILE))
      .map((pick) => {
        const id = pick.slice(FILE.length);
        return { pick, name: this.files.find((file) => file.id === id)?.label ?? id };
      });
    sync(this.chips, [...branches, ...files], {
      key: ({ pick }) => pick,
      make: ({ pick, name }) => ({ node: this.pickButton(pick, name) }),
      update: ({ node }, { pick }) => setAttr(node, "aria-pressed", String(this.picks.includes(pick))),
    });
  }

  /**
   * @param {string} pick
   * @param {string} name
   */
  pickButton(pick, name) {
    return element("button", {
      type: "button",
      class: "cb-chip cb-pick",
      "data-pick": pick,
      title: "In or out of the comparison",
      dir: "auto",
      text: cut(name, 40),
      onclick: () => this.togglePick(pick),
    });
  }

  /**
   * In or out. Branches come in the order of the family, files after them.
   * @param {string} pick
   */
  togglePick(pick) {
    const order = this.branches.map((branch) => BRANCH + branch.name);
    const place = (/** @type {string} */ one) => (order.includes(one) ? order.indexOf(one) : order.length);
    const others = this.picks.filter((other) => other !== pick);
    this.picks = others.length < this.picks.length ? others : [...this.picks, pick];
    this.picks.sort((a, b) => place(a) - place(b));
    this.drawPicks();
    this.ask();
  }

  // asking and being told ------------------------------------------------------------------------------------

  ask() {
    showError(this.error, "");
    if (this.picks.length >= 2 && this.picks.length <= MOST_RUNS) {
      this.pending = true;
      this.app.send("compare", { picks: this.picks });
      return;
    }
    const alone = this.branches.length + this.files.length < 2;
    this.clear();
    this.error.classList.add("cb-quiet");
    showError(
      this.error,
      alone
        ? "There is one run only: fork it, change something, and compare the two."
        : `Pick 2 to ${MOST_RUNS} runs.`,
    );
  }

  clear() {
    this.runs = [];
    this.lanes = [];
    this.data = null;
    this.laneBox.replaceChildren();
    this.results.hidden = true;
  }

  /** @param {Said} answer */
  said({ error }) {
    this.pending = false;
    this.error.classList.remove("cb-quiet");
    showError(this.error, error);
    if (error) this.clear();
  }

  /** @param {Compared} data the runs themselves follow */
  compared(data) {
    if (data.picks.join() === this.picks.join()) this.coming = { data, runs: [] };
  }

  /**
   * @param {ComparedRun} head
   * @param {DataView<ArrayBuffer>[]} buffers
   */
  comparedRun(head, buffers) {
    if (!this.coming) return;
    const run = new Run(head);
    run.apply(head, namedBuffers(head, buffers));
    const { data, runs } = this.coming;
    runs[head.i] = run;
    if (head.i < data.runs.length - 1) return;
    this.coming = null;
    this.pending = false;
    this.data = data;
    this.runs = runs;
    this.alignAsPossible(data);
    this.at = this.pageStep() ?? Math.min(this.at, this.mostSteps());
    this.host.classList.toggle("cb-cmpmany", runs.length > 2);
    this.build(data);
  }

  /** @param {Compared} data */
  alignAsPossible({ by_time }) {
    if (!by_time) this.byTime = false;
    this.alignSelect.value = this.byTime ? "time" : "step";
    this.timeOption.disabled = !by_time;
    this.alignSelect.title = by_time ? "" : "The clocks differ: runs can be aligned by step only";
  }

  // cursors --------------------------------------------------------------------------------------------------

  mostSteps() {
    return Math.max(0, ...this.runs.map((run) => run.steps));
  }

  /** Tables of steps beside each other; null: aligned by step. */
  get tables() {
    return this.byTime ? (this.data?.by_time ?? null) : null;
  }

  /** The place of the page's branch among the compared runs; -1: it is not compared. */
  get pagePlace() {
    return this.picks.indexOf(BRANCH + this.branch);
  }

  /** Where the page's cursor is, as a step of the first run; null: it isn't compared. */
  pageStep() {
    const place = this.pagePlace;
    const run = this.app.current;
    if (place < 0 || !run || !this.data) return null;
    return stepOfFirst(place, clamp(run.step, 0, this.data.runs[place].steps), this.tables);
  }

  cursors() {
    return this.data ? stepsBeside(this.at, this.data.runs, this.tables) : [];
  }

  /**
   * Moves the cursors, and the page's with them.
   * @param {number} step of the first run
   */
  go(step) {
    this.at = step;
    this.drawCursors();
    const place = this.pagePlace;
    const wanted = this.cursors()[place];
    if (place >= 0 && wanted !== this.app.run.step) this.app.seek(wanted);
  }

  /** Called with the page's words: the page's cursor takes ours along, and a run that has grown is compared again. */
  draw() {
    if (!this.open || !this.data) return;
    this.paint();
    const place = this.pagePlace;
    const compared = this.data.runs[place];
    const { current: run, live } = this.app;
    if (!compared || !run) return;
    if (this.cursors()[place] !== clamp(run.step, 0, compared.steps)) {
      this.at = this.pageStep() ?? this.at;
      this.drawCursors();
    }
    const grown = run.steps !== compared.steps;
    if (grown && !this.pending && !live.playing && !live.loading) this.ask();
  }

  drawCursors() {
    const steps = this.cursors();
    this.scrub.value = String(this.byTime ? steps[0] : this.at);
    this.lanes.forEach((lane, i) => lane.drawCursor(steps[i]));
  }

  // the picture ----------------------------------------------------------------------------------------------

  /** @param {Compared} data */
  build(data) {
    const [first] = data.runs;
    this.results.hidden = false;
    this.lanes = data.runs.map(({ name }, i) => this.lane(name, i));
    this.laneBox.replaceChildren(...this.lanes.map((lane) => lane.node));
    this.table.replaceChildren(...metricsTable(data));
    setText(this.notes, data.notes.join("; "));
    const go = (/** @type {number} */ step) => this.go(this.byTime ? Math.min(step, first.steps) : step);
    this.pairs.replaceChildren(...data.pairs.map((pair) => pairSection(this.app, pair, first.name, go)));
    this.dirty = true;
    this.paint();
  }

  /**
   * @param {string} name
   * @param {number} i
   */
  lane(name, i) {
    const branch = this.branches.find((other) => BRANCH + other.name === this.picks[i]);
    const goesOn = branch?.live && !branch.done;
    const finish = goesOn ? () => this.app.send("finish", { name }) : null;
    const go = (/** @type {number} */ step) => this.go(stepOfFirst(i, step, this.tables));
    return new Lane(this.app, this.runs[i], name, finish, go);
  }

  paint() {
    if (!this.dirty || !this.open || !this.data) return;
    const width = this.laneBox.clientWidth;
    if (!width) return;
    this.dirty = false;
    const { byTime } = this;
    const columns = byTime ? TICKS : Math.max(LEAST_COLUMNS, this.mostSteps());
    this.scrub.max = String(byTime ? this.data.runs[0].steps : this.mostSteps());
    const alignment = { byTime, span: spanOf(this.runs), columns };
    this.lanes.forEach((lane, i) => lane.paint(width, alignment, i === this.lanes.length - 1));
    this.drawCursors();
  }

  destroy() {
    this.sizes.disconnect();
  }
}
