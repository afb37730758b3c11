// What the widget does when its kernel has ended or can't be reached: it says so, and what needs a kernel is off.
// @ts-check
import { element, setText } from "./dom.js";
import { watchWidget } from "../jupyter/voila/templates/cbviz/static/kernel.js";

/** @import { KernelState } from "../jupyter/voila/templates/cbviz/static/kernel.js" */
/** @import { KernelModel } from "./messages.js" */

/** @typedef {HTMLButtonElement | HTMLSelectElement | HTMLInputElement | HTMLTextAreaElement} Control */

/** @type {Record<KernelState, string>} */
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
   * @param {KernelModel} model
   * @param {HTMLElement} root the widget
   * @param {(on: boolean) => void} onChange told whether the kernel can be asked
   */
  constructor(model, root, onChange) {
    this.root = root;
    this.onChange = onChange;
    this.bar = element("div", { class: "cb-kernelbar", role: "alert", hidden: true });
    /** @type {Control[]} controls that we have switched off */
    this.off = [];
    /** @type {KernelState} */
    this.state = "";
    this.stop = watchWidget(model, (state) => this.show(state));
  }

  /** @param {KernelState} state */
  show(state) {
    if (this.state === "ended") return;
    this.state = state;
    // Voilà's page has a notice of its own, with a button that loads it again.
    const itsOwnPage = document.body.hasAttribute("data-voila");
    setText(this.bar, KERNEL_TEXTS[state]);
    this.bar.hidden = !state || itsOwnPage;
    this.root.classList.toggle("cb-nokernel", !!state);
    this.onChange(!state);
    if (state) this.switchOff();
    else this.switchOn();
  }

  switchOff() {
    /** @type {NodeListOf<Control>} */
    const controls = this.root.querySelectorAll("button, select, input, textarea");
    for (const control of controls) {
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
