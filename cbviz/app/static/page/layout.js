// Where the panels stand; one of them can be enlarged; the comparison takes the place of all.
// @ts-check
import { element, icon, ICON, setText } from "../dom.js";

/** @import { App } from "./state.js" */

/** CSS pixels of the page below which the panels stand in one column, or in two. */
const NARROW = 700;
const MIDDLE = 1080;
/** Panels that may scroll and hold nothing else that the keyboard could reach. */
const SCROLLING = ["why", "table", "metrics"];

export class Panel {
  /**
   * @param {string} name
   * @param {string} title
   * @param {() => void} enlarge
   */
  constructor(name, title, enlarge) {
    this.body = element("div", { class: "cb-body" });
    this.title = element("h2", { text: title });
    this.subtitle = element("span", { class: "cb-subtitle" });
    this.enlargeButton = element(
      "button",
      {
        type: "button",
        class: "cb-tool cb-max",
        title: "Enlarge",
        "aria-label": `Enlarge ${title}`,
        onclick: enlarge,
      },
      icon(ICON.max, 11),
    );
    const grow = element("span", { class: "cb-grow" });
    const head = element("div", { class: "cb-phead" }, this.title, this.subtitle, grow, this.enlargeButton);
    this.node = element("section", { class: `cb-panel cb-${name} `, "aria-label": title }, head, this.body);
    if (SCROLLING.includes(name)) this.body.tabIndex = 0;
  }

  /** @param {...HTMLElement} tools in the panel's head */
  addTools(...tools) {
    this.enlargeButton.before(...tools);
  }

  /** @param {boolean} on */
  setEnlarged(on) {
    this.node.classList.toggle("cb-big", on);
    const label = on ? "Back to its place" : `Enlarge ${this.title.textContent}`;
    this.enlargeButton.setAttribute("aria-label", label);
  }
}

export class Layout {
  /**
   * @param {App} app
   * @param {{ resized: () => void, enlarged: () => void }} listeners
   */
  constructor(app, { resized, enlarged }) {
    this.app = app;
    this.onEnlarged = enlarged;
    /** @type {string | null} the panel that is enlarged */
    this.enlarged = null;
    /** @type {Record<string, Panel>} */
    this.panels = {};
    const panel = (/** @type {string} */ name, /** @type {string} */ title) => this.panel(name, title);
    const all = {
      controls: panel("controls", "Setup"),
      promptbox: panel("promptbox", "New request"),
      timeline: panel("timeline", "Timeline"),
      blocks: panel("blocks", "KV blocks"),
      batch: panel("batch", "Batch"),
      util: panel("util", "Utilisation"),
      tokens: panel("tokens", "Text"),
      why: panel("why", "Why"),
      queue: panel("queue", "Queue"),
      table: panel("table", "Block table"),
      metrics: panel("metrics", "Metrics"),
      compare: panel("compare", "Compare"),
    };
    const { controls, promptbox, timeline, blocks, batch, util } = all;
    const { tokens, why, queue, table, metrics, compare } = all;
    this.side = element("aside", { class: "cb-left" }, controls.node, promptbox.node);
    const stack = element("div", { class: "cb-stack" }, batch.node, util.node);
    const row = element("div", { class: "cb-midrow" }, blocks.node, stack);
    const middle = element("div", { class: "cb-mid" }, timeline.node, row, tokens.node);
    const right = element("div", { class: "cb-right" }, why.node, queue.node, table.node, metrics.node);
    compare.node.hidden = true;
    this.main = element("main", { class: "cb-main" }, this.side, middle, right, compare.node);
    this.hint = firstHint();
    this.loadingText = element("span", { text: "starting the engine" });
    this.loading = element("div", { class: "cb-wait" }, this.loadingText);
    timeline.body.append(this.hint, this.loading);
    this.blocksHost = element("div", { class: "cb-plot" });
    blocks.body.append(this.blocksHost);
    this.root = element("div", {
      class: "cb-root",
      dir: "ltr",
      tabindex: "-1",
      "data-lm-suppress-shortcuts": "true",
    });
    this.sizes = new ResizeObserver(() => {
      const width = this.root.clientWidth;
      this.root.classList.toggle("cb-narrow", width < NARROW);
      this.root.classList.toggle("cb-middle", width >= NARROW && width < MIDDLE);
      resized();
    });
  }

  /**
   * @param {string} name
   * @param {string} title
   */
  panel(name, title) {
    const made = new Panel(name, title, () => this.enlarge(name));
    this.panels[name] = made;
    return made;
  }

  focus() {
    this.root.focus({ preventScroll: true });
  }

  /**
   * Enlarges a panel; the one that is enlarged goes back to its place.
   * @param {string} name
   */
  enlarge(name) {
    const before = this.enlarged;
    this.enlarged = before === name ? null : name;
    if (before) this.panels[before].setEnlarged(false);
    if (this.enlarged) this.panels[name].setEnlarged(true);
    this.root.classList.toggle("cb-hasbig", !!this.enlarged);
    this.onEnlarged();
  }

  /** The enlarged panel goes back to its place. */
  shrink() {
    if (this.enlarged) this.enlarge(this.enlarged);
  }

  /** @param {string} text what is being loaded before the first picture */
  showLoading(text) {
    this.loading.hidden = false;
    setText(this.loadingText, text);
  }

  /** After a picture or news of the session. */
  draw() {
    const { run, live } = this.app;
    this.hint.hidden = run.steps > 0 || !!live.loading;
    this.root.classList.toggle("cb-past", run.step < run.steps);
  }

  /**
   * A panel that only some pages have.
   * @param {string} name
   * @param {string} title
   */
  addSidePanel(name, title) {
    const panel = this.panel(name, title);
    this.side.append(panel.node);
    return panel;
  }
}

function firstHint() {
  return element(
    "div",
    { class: "cb-hint", hidden: true },
    element("b", { text: "Press Step" }),
    " or the right arrow key to run the first iteration. ",
    element("span", {
      text: "Space plays. Point at anything to read it, click a request to follow it everywhere.",
    }),
  );
}
