// The state of the page, and what its parts may ask of it. Each part gets the one `App` and reads what it draws from there.
// @ts-check
import { STATES, STATE_TEXT } from "../color.js";
import { element, setText } from "../dom.js";

/** @import { Account, Inside, Live, Metrics, NoAccount, Stop, Why } from "../messages.js" */
/** @import { Theme } from "../page.js" */
/** @import { Popover } from "../popover.js" */
/** @import { PromptBox } from "../promptbox.js" */
/** @import { Run } from "../store.js" */
/** @import { KernelLine } from "./kernel.js" */
/** @import { Layout } from "./layout.js" */
/** @import { Painter } from "./painter.js" */
/** @import { Views } from "./views.js" */

/** @typedef {{ request?: string, block?: number }} Question what the Why panel was asked about */

/** Milliseconds after which a sentence is read to those who don't see the page: of several the last one. */
const SAY_AFTER = 120;

export class App {
  /**
   * @param {KernelLine} kernel
   * @param {Theme} theme
   */
  constructor(kernel, theme) {
    this.kernel = kernel;
    this.theme = theme;
    /** @type {Run | null} null: no picture has come yet */
    this.current = null;
    /** @type {Views | null} the pictures; null before the first one */
    this.views = null;
    /** @type {Live} */
    this.live = {};

    // what the kernel has said about the cursor's step
    /** @type {Why | null} */
    this.why = null;
    /** @type {Metrics | null} */
    this.metrics = null;
    /** @type {Account | NoAccount | null} */
    this.account = null;
    /** @type {Inside | null} */
    this.inside = null;
    /** @type {Stop | null} where the run stopped */
    this.stop = null;

    // what the user has chosen
    /** Row of the picked request; -1: none. */
    this.selected = -1;
    /** @type {Question | null} */
    this.asked = null;
    /** @type {Popover | null} the one that is open */
    this.popup = null;
    /** The id of the prompt that was added last. */
    this.added = "";
    /** @type {string | null} the branch that is shown */
    this.branch = null;
    /** The engine can be taken back to an earlier step. */
    this.canRewind = false;

    /** Animation frames in which the timeline or the block map was painted. */
    this.frames = 0;
    /** Reads sentences to those who don't see the page. */
    this.announcer = element("div", { class: "cb-sr", role: "status", "aria-live": "polite" });
    this.sayTimer = 0;
    /** @type {number | null} the step to go to in the next animation frame */
    this.seekingTo = null;
    /** @type {{ layout: Layout, painter: Painter, promptBox: PromptBox } | null} */
    this.connected = null;
  }

  /**
   * Once the page is built.
   * @param {{ layout: Layout, painter: Painter, promptBox: PromptBox }} parts
   */
  connect(parts) {
    this.connected = parts;
  }

  get parts() {
    if (!this.connected) throw new Error("the page is not built yet");
    return this.connected;
  }

  /** The run on the page. What is drawn or clicked after the first picture may ask for it. */
  get run() {
    if (!this.current) throw new Error("no picture has come yet");
    return this.current;
  }

  /** Requests of the workload, also those still to come. */
  get numRequests() {
    return this.live.num_requests || 0;
  }

  /**
   * A command to the kernel.
   * @param {string} cmd
   * @param {Record<string, unknown>} [more]
   */
  send(cmd, more = {}) {
    this.kernel.send(cmd, more);
  }

  /** Asks for an animation frame. */
  markDirty() {
    this.connected?.painter.request();
  }

  /** @param {string} text */
  say(text) {
    clearTimeout(this.sayTimer);
    this.sayTimer = setTimeout(() => setText(this.announcer, text), SAY_AFTER);
  }

  step() {
    this.send("step");
  }

  /**
   * Goes to a step; while somebody scrubs, one a frame.
   * @param {number} step
   */
  seek(step) {
    if (this.seekingTo === null) {
      requestAnimationFrame(() => {
        this.send("seek", { step: this.seekingTo });
        this.seekingTo = null;
      });
    }
    this.seekingTo = step;
  }

  rewind() {
    this.send("rewind", { step: this.run.step });
  }

  /**
   * Asks why a request or a block is what it is.
   * @param {Question | null} question
   */
  ask(question) {
    if (JSON.stringify(question) === JSON.stringify(this.asked)) return;
    this.asked = question;
    this.send("ask", { ...question });
  }

  /**
   * Picks a request everywhere on the page.
   * @param {number} row -1: none
   */
  select(row) {
    const { run } = this;
    const { layout, painter } = this.parts;
    this.selected = row;
    this.say(row < 0 ? "Selection cleared" : this.describeSelected(run));
    this.ask(row < 0 ? null : { request: run.id(row) });
    this.views?.selectionChanged();
    painter.paintWords();
    layout.panels.tokens.body.scrollTop = 0;
    this.markDirty();
  }

  /** @param {Run} run */
  describeSelected(run) {
    const request = run.rows[this.selected];
    const state = request ? `, ${STATE_TEXT[STATES[request.code]]}, ${request.blocks.length} blocks` : "";
    return `${run.id(this.selected)} selected${state}`;
  }

  /** The text in the prompt box. */
  promptText() {
    return this.parts.promptBox.text.value;
  }

  promptAsked() {
    return this.parts.promptBox.asked();
  }

  focus() {
    this.parts.layout.focus();
  }

  /** @param {string} panel */
  isEnlarged(panel) {
    return this.connected?.layout.enlarged === panel;
  }
}
