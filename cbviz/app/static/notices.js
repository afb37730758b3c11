// What the user must know about this page, each with a button that closes it: a copy of a run, what is missing of it, mistakes in the address.
import { h, sync } from "./dom.js";

/** @typedef {{ id: number, text: string, bad: boolean }} Notice */

export class Notices {
  /** @param {{ send: (cmd: string, more?: object) => void }} app */
  constructor(app) {
    this.app = app;
    this.el = h("div", { class: "cb-notices", role: "status" });
  }

  /** @param {Notice[]} list */
  show(list) {
    sync(
      this.el,
      list,
      (notice) => notice.id,
      (notice) => this.row(notice),
    );
  }

  /** @param {Notice} notice */
  row(notice) {
    const close = h("button", {
      type: "button",
      class: "cb-btn cb-only",
      "aria-label": "Close this notice",
      text: "×",
    });
    close.addEventListener("click", () => this.app.send("seen", { id: notice.id }));
    return h(
      "div",
      { class: notice.bad ? "cb-notice cb-badnotice" : "cb-notice" },
      h("span", { text: notice.text }),
      close,
    );
  }
}

/**
 * Tells the kernel that the page is being left, so that the next page can have its run at once.
 * A page that the browser brings back whole ("back" in the history) has lost its kernel: it loads again.
 * @param {{ send: (message: object) => void }} model
 * @returns {() => void} stops it
 */
export function watchLeaving(model) {
  const leave = () => model.send({ type: "leaving" });
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
