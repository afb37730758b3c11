// What the user must know about this page, each with a button that closes it: a copy of a run, what is missing of it, mistakes in the address.
// @ts-check
import { element, sync } from "./dom.js";

/** @import { Notice, ToKernel } from "./messages.js" */
/** @import { App } from "./page/state.js" */

export class Notices {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.node = element("div", { class: "cb-notices", role: "status" });
  }

  /** @param {Notice[]} list */
  show(list) {
    sync(this.node, list, {
      key: (notice) => notice.id,
      make: (notice) => ({ node: this.row(notice) }),
    });
  }

  /** @param {Notice} notice */
  row(notice) {
    const close = element("button", {
      type: "button",
      class: "cb-btn cb-only",
      "aria-label": "Close this notice",
      text: "×",
    });
    close.addEventListener("click", () => this.app.send("seen", { id: notice.id }));
    return element(
      "div",
      { class: notice.bad ? "cb-notice cb-badnotice" : "cb-notice" },
      element("span", { text: notice.text }),
      close,
    );
  }
}

/**
 * Tells the kernel that the page is being left, so that the next page can have its run at once.
 * A page that the browser brings back whole ("back" in the history) has lost its kernel: it loads again.
 * @param {{ post: (message: ToKernel) => void }} kernel
 * @returns {() => void} stops it
 */
export function watchLeaving(kernel) {
  const leave = () => kernel.post({ type: "leaving" });
  const back = (/** @type {PageTransitionEvent} */ e) => {
    if (e.persisted) location.reload();
  };
  addEventListener("pagehide", leave);
  addEventListener("pageshow", back);
  return () => {
    removeEventListener("pagehide", leave);
    removeEventListener("pageshow", back);
  };
}
