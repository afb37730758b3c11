// The keyboard: what a key does, and the list of keys.
// @ts-check
import { element } from "../dom.js";
import { ownPage } from "../theme.js";

/** @import { AloneView } from "../alone.js" */
/** @import { BreakMenu } from "../breaks.js" */
/** @import { Presenter } from "../classroom.js" */
/** @import { ForkForm } from "../forkform.js" */
/** @import { PromptBox } from "../promptbox.js" */
/** @import { Comparison } from "./comparison.js" */
/** @import { Layout } from "./layout.js" */
/** @import { App } from "./state.js" */
/** @import { Transport } from "./transport.js" */
/** @import { UtilisationPanel } from "./utilisation.js" */

const KEYS = [
  ["Space", "play or pause"],
  ["→", "one step on (a recorded one, or a new one)"],
  ["←", "one step back"],
  [". and ,", "one event on or back, inside the step"],
  ["Home, End", "first or last recorded step"],
  ["↑ ↓", "in the timeline: the request above or below"],
  ["/", "to the prompt box"],
  ["Shift F, B, C", "fork here, breakpoints, compare"],
  ["Shift N, L", "on to the next stop, back to the last one"],
  ["Shift R", "rewind the engine to this step"],
  ["Shift A", "accounts in place of utilisation"],
  ["Shift X", "a mixture's experts in place of utilisation"],
  ["Shift U, I", "the roofline, or the inside of a step, in place of utilisation"],
  ["P", "large type for a projector, and back"],
  ["Esc", "drop the selection, close what is open"],
  ["?", "this list"],
];

/** Where letters are typed, so that they are no commands. */
const TYPING = "textarea, select, input:not([type=range]):not([type=checkbox])";
/** What a click focuses by itself. */
const FOCUSABLE = "button, input, select, textarea, .cb-frame, dialog, label, a";

/** The list of keys. */
export class KeysBox {
  constructor() {
    const rows = KEYS.map(([keys, text]) =>
      element("div", {}, element("dt", { text: keys }), element("dd", { text })),
    );
    const close = element("button", {
      type: "button",
      class: "cb-btn",
      text: "Close",
      onclick: () => this.node.close(),
    });
    this.node = element(
      "dialog",
      { class: "cb-dialog cb-keys", "aria-label": "Keyboard shortcuts" },
      element("h2", { text: "Keyboard" }),
      element("dl", {}, ...rows),
      close,
    );
  }

  toggle() {
    if (this.node.open) this.node.close();
    else this.node.showModal();
  }
}

/**
 * The parts of the page that keys act on.
 * @typedef {{
 *   layout: Layout, transport: Transport, utilisation: UtilisationPanel, comparison: Comparison, presenter: Presenter,
 *   promptBox: PromptBox, fork: ForkForm, breaks: BreakMenu, alone: AloneView, keysBox: KeysBox,
 * }} KeyParts
 */

/**
 * Does something only while its button can be used.
 * @param {HTMLButtonElement} button
 * @param {() => void} action
 */
const ifAble = (button, action) => () => {
  if (!button.hidden && !button.disabled) action();
};

export class Keyboard {
  /**
   * @param {App} app
   * @param {KeyParts} parts
   */
  constructor(app, parts) {
    this.app = app;
    this.parts = parts;
    this.root = parts.layout.root;
    const { transport, utilisation, comparison, fork, breaks, presenter, keysBox } = parts;
    const { forkButton, breakButton, compareButton, rewindButton } = transport;
    const { accountTab, expertTab, roofTab, insideTab } = utilisation;
    /** @type {Record<string, () => void>} with the Shift key */
    this.shifted = {
      F: ifAble(forkButton, () => fork.popover.toggle()),
      B: ifAble(breakButton, () => breaks.popover.toggle()),
      C: ifAble(compareButton, () => comparison.toggle()),
      X: ifAble(expertTab, () => expertTab.click()),
      U: () => roofTab.click(),
      I: () => insideTab.click(),
      N: ifAble(breakButton, () => breaks.run("run-on")),
      L: ifAble(breakButton, () => breaks.run("run-back")),
      A: ifAble(accountTab, () => accountTab.click()),
      R: ifAble(rewindButton, () => app.rewind()),
    };
    const present = () => presenter.set(!presenter.on);
    /** @type {Record<string, () => void>} */
    this.plain = {
      "?": () => keysBox.toggle(),
      p: present,
      P: present,
      "/": () => this.toPrompt(),
      " ": () => app.send(app.live.playing ? "pause" : "play"),
      ArrowRight: () => app.step(),
      ArrowLeft: () => app.send("back"),
      Home: () => app.seek(0),
      End: () => app.send("end"),
      ".": () => app.send("event", { by: 1 }),
      ",": () => app.send("event", { by: -1 }),
    };
    this.root.addEventListener("keydown", (event) => this.onKey(event));
    this.root.addEventListener("mousedown", (event) => this.onMouseDown(event));
    this.onOuterKey = (/** @type {KeyboardEvent} */ event) => this.forward(event);
    document.addEventListener("keydown", this.onOuterKey);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = this.actionOf(event);
    if (!action) return;
    action();
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * What a key does; null: it isn't ours.
   * @param {KeyboardEvent} event
   */
  actionOf(event) {
    const { key } = event;
    const target = /** @type {HTMLElement} */ (event.target);
    const typing = target.matches(TYPING);
    const { alone, keysBox } = this.parts;
    if (key === "Escape") return this.escape(typing);
    if (alone.box.open || (keysBox.node.open && key !== "?")) return null;
    if (key !== "?" && this.isTheirs(key, target)) return null;
    if (typing || (key === " " && usesSpace(target))) return null;
    if (this.plain[key]) return this.plain[key];
    return event.shiftKey ? (this.shifted[key] ?? null) : null;
  }

  /**
   * Whether a key belongs to what has the focus: an open dialog, or the comparison's cursor.
   * @param {string} key
   * @param {HTMLElement} target
   */
  isTheirs(key, target) {
    if (this.app.popup?.box.contains(target)) return true;
    return target.matches(".cb-cmp-scrub") && key !== " ";
  }

  /**
   * Closes what lies on top; at last it drops the selection.
   * @param {boolean} typing
   */
  escape(typing) {
    const { app } = this;
    const { alone, keysBox, comparison, layout } = this.parts;
    if (alone.box.open) return () => alone.box.close();
    if (keysBox.node.open) return () => keysBox.node.close();
    const { popup } = app;
    if (popup) return () => popup.close();
    if (comparison.open) return () => comparison.show(false);
    if (layout.enlarged) return () => layout.shrink();
    if (typing) return () => this.root.focus();
    if (app.selected >= 0) return () => app.select(-1);
    return null;
  }

  toPrompt() {
    const { presenter, promptBox } = this.parts;
    if (presenter.on) presenter.set(false);
    promptBox.text.focus();
  }

  /**
   * In Voilà the page is ours: keys work wherever the focus is. In JupyterLab only inside the widget.
   * @param {KeyboardEvent} event
   */
  forward(event) {
    if (!ownPage() || this.root.contains(/** @type {Node} */ (event.target))) return;
    const { key, ctrlKey, metaKey, altKey, shiftKey } = event;
    const copy = new KeyboardEvent("keydown", {
      key,
      bubbles: false,
      cancelable: true,
      ctrlKey,
      metaKey,
      altKey,
      shiftKey,
    });
    if (!this.root.dispatchEvent(copy)) event.preventDefault();
  }

  /**
   * A click on nothing in particular gives the page the focus, so that keys work.
   * @param {MouseEvent} event
   */
  onMouseDown(event) {
    const target = /** @type {Element} */ (event.target);
    if (target.closest(FOCUSABLE)) return;
    setTimeout(() => {
      if (!this.root.contains(document.activeElement)) this.root.focus({ preventScroll: true });
    }, 0);
  }

  destroy() {
    document.removeEventListener("keydown", this.onOuterKey);
  }
}

/**
 * Whether the space bar already does something where the focus is.
 * @param {HTMLElement} target
 */
function usesSpace(target) {
  const isCheckbox = target instanceof HTMLInputElement && target.type === "checkbox";
  return target.tagName === "BUTTON" || target.tagName === "SUMMARY" || isCheckbox;
}
