// The comparison, which takes the place of the panels while it is open.
// @ts-check
import { ComparePanel } from "../compare.js";
import { element } from "../dom.js";

/** @import { Layout } from "./layout.js" */
/** @import { App } from "./state.js" */

export class Comparison {
  /**
   * @param {App} app
   * @param {Layout} layout
   */
  constructor(app, layout) {
    this.layout = layout;
    this.node = layout.panels.compare.node;
    this.panel = new ComparePanel(app, layout.panels.compare.body);
    /** @type {HTMLButtonElement | null} the button that opens it */
    this.opener = null;
    this.closeButton = element("button", {
      type: "button",
      class: "cb-btn cb-small cb-compare-close",
      text: "Close",
      title: "Back to the run (Esc)",
      onclick: () => this.show(false),
    });
    layout.panels.compare.addTools(this.closeButton);
    layout.panels.compare.enlargeButton.remove();
  }

  get open() {
    return this.panel.open;
  }

  toggle() {
    this.show(!this.open);
  }

  /** @param {boolean} open */
  show(open) {
    if (open === this.open) return;
    this.node.hidden = !open;
    this.layout.root.classList.toggle("cb-comparing", open);
    this.opener?.setAttribute("aria-expanded", String(open));
    this.panel.show(open);
    const focused = open ? this.closeButton : this.opener;
    focused?.focus({ preventScroll: true });
  }

  destroy() {
    this.panel.destroy();
  }
}
