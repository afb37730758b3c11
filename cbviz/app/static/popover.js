// A small dialog under a button. One is open at a time; Escape and a click elsewhere close it, and the focus goes back to its button.
// @ts-check
import { element } from "./dom.js";

/** @import { App } from "./page/state.js" */

/** CSS pixels below the button, and least distance to the page's edges. */
const BELOW = 5;
const MARGIN = 6;

export class Popover {
  /**
   * @param {App} app
   * @param {HTMLElement} root of the page
   * @param {HTMLButtonElement} button
   * @param {string} label
   * @param {string} className
   * @param {() => void} opening called before it is shown
   */
  constructor(app, root, button, label, className, opening = () => {}) {
    this.app = app;
    this.root = root;
    this.button = button;
    this.opening = opening;
    this.box = element("div", {
      class: "cb-pop " + className,
      role: "dialog",
      "aria-label": label,
      hidden: true,
      tabindex: "-1",
    });
    root.append(this.box);
    button.setAttribute("aria-haspopup", "dialog");
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => this.toggle());
    /** @param {MouseEvent} event */
    this.closeOutside = (event) => {
      const target = /** @type {Node} */ (event.target);
      if (!this.box.contains(target) && !button.contains(target)) this.close(false);
    };
  }

  get open() {
    return !this.box.hidden;
  }

  toggle() {
    if (this.open) this.close();
    else this.show();
  }

  show() {
    if (this.button.disabled || this.button.hidden) return;
    this.app.popup?.close(false);
    this.app.popup = this;
    this.opening();
    this.box.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.place();
    document.addEventListener("mousedown", this.closeOutside, true);
    this.firstControl().focus({ preventScroll: true });
  }

  /** @returns {HTMLElement} */
  firstControl() {
    /** @type {HTMLElement | null} */
    const field = this.box.querySelector("input:not([disabled]), select:not([disabled])");
    return field ?? this.box.querySelector("button") ?? this.box;
  }

  /** Under its button, within the page. */
  place() {
    const page = this.root.getBoundingClientRect();
    const button = this.button.getBoundingClientRect();
    const { style, offsetWidth } = this.box;
    style.top = `${button.bottom - page.top + BELOW}px`;
    style.maxHeight = `${Math.max(160, Math.min(innerHeight, page.bottom) - button.bottom - 14)}px`;
    style.left = `${Math.max(MARGIN, Math.min(button.left - page.left, page.width - offsetWidth - 8))}px`;
  }

  /** @param {boolean} [focusButton] */
  close(focusButton = true) {
    if (!this.open) return;
    this.box.hidden = true;
    this.app.popup = null;
    this.button.setAttribute("aria-expanded", "false");
    document.removeEventListener("mousedown", this.closeOutside, true);
    if (focusButton) this.button.focus({ preventScroll: true });
  }
}

/** @param {string} className */
export const errorLine = (className) =>
  element("p", { class: "cb-error " + className, role: "alert", hidden: true });

/**
 * @param {HTMLElement} line
 * @param {string | null | undefined} text empty: no error
 */
export function showError(line, text) {
  line.textContent = text || "";
  line.hidden = !text;
}
