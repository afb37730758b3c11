// What the widget does when its kernel has ended or can't be reached: it says so, and what needs a kernel is off.
import { h, setText } from "./dom.js";
import { watchWidget } from "../jupyter/voila/templates/cbviz/static/kernel.js";

const KERNEL_TEXTS = {
  "": "",
  lost: "The connection to the kernel is lost. Trying again.",
  unreachable:
    "The kernel can't be reached any more. Choose Kernel > Reconnect to Kernel, or run the cell again.",
  ended:
    "The kernel behind this explorer has ended (restarted, shut down or died). Run the cell again to go on; the picture below is the last one.",
};
/** What works without a kernel: looking at the last picture. */
const LOOKING =
  ".cb-theme, .cb-present, .cb-help, .cb-max, [aria-label='Show everything'], .cb-chip, .cb-id, .cb-rooftab, .cb-compare-close, .cb-kernelbar *";

export class KernelNotice {
  /**
   * @param {any} model anywidget's model
   * @param {HTMLElement} root the widget
   * @param {(on: boolean) => void} onChange told whether the kernel can be asked
   */
  constructor(model, root, onChange) {
    this.root = root;
    this.onChange = onChange;
    this.bar = h("div", { class: "cb-kernelbar", role: "alert", hidden: true });
    this.off = [];
    this.state = "";
    this.stop = watchWidget(model, (state) => this.show(state));
  }

  /** @param {"" | "lost" | "unreachable" | "ended"} state */
  show(state) {
    if (this.state === "ended") return;
    this.state = state;
    const itsOwnPage = document.body.hasAttribute("data-voila"); // it has a notice of its own, with a button that loads it again
    setText(this.bar, KERNEL_TEXTS[state]);
    this.bar.hidden = !state || itsOwnPage;
    this.root.classList.toggle("cb-nokernel", !!state);
    this.onChange(!state);
    if (state) this.switchOff();
    else this.switchOn();
  }

  switchOff() {
    for (const control of this.root.querySelectorAll("button, select, input, textarea")) {
      if (control.disabled || control.matches(LOOKING)) continue;
      control.disabled = true;
      this.off.push(control);
    }
  }

  switchOn() {
    for (const control of this.off) control.disabled = false;
    this.off = [];
  }

  destroy() {
    this.stop();
  }
}
