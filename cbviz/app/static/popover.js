// A small dialog under a button. One is open at a time; Escape and a click elsewhere close it, and the focus goes back to its button.
import { h } from "./dom.js";
export class Popover {
  constructor(app, root, button, label, cls, opening = () => {}) {
    Object.assign(this, { app, root, button, opening });
    this.box = h("div", {
      class: "cb-pop " + cls,
      role: "dialog",
      "aria-label": label,
      hidden: true,
      tabindex: "-1",
    });
    root.append(this.box);
    button.setAttribute("aria-haspopup", "dialog");
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => this.toggle());
    this.outside = (e) => {
      if (!this.box.contains(e.target) && !button.contains(e.target)) this.close(false);
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
    if (this.app.popup) this.app.popup.close(false);
    this.app.popup = this;
    this.opening();
    this.box.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.place();
    document.addEventListener("mousedown", this.outside, true);
    (
      this.box.querySelector("input:not([disabled]), select:not([disabled])") ||
      this.box.querySelector("button") ||
      this.box
    ).focus({ preventScroll: true });
  }
  place() {
    const r = this.root.getBoundingClientRect();
    const b = this.button.getBoundingClientRect();
    const top = b.bottom - r.top + 5;
    const s = this.box.style;
    const w = this.box.offsetWidth;
    s.top = top + "px";
    s.maxHeight = Math.max(160, Math.min(innerHeight, r.bottom) - b.bottom - 14) + "px";
    s.left = Math.max(6, Math.min(b.left - r.left, r.width - w - 8)) + "px";
  }
  close(back = true) {
    if (!this.open) return;
    this.box.hidden = true;
    this.app.popup = null;
    this.button.setAttribute("aria-expanded", "false");
    document.removeEventListener("mousedown", this.outside, true);
    if (back) this.button.focus({ preventScroll: true });
  }
}
export const errorLine = (cls) => h("p", { class: "cb-error " + cls, role: "alert", hidden: true });
export function fail(p, text) {
  p.textContent = text || "";
  p.hidden = !text;
}
