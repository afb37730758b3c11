// The line under the transport: what is being loaded, what went wrong, what can be done about it.
// @ts-check
import { element, setText } from "../dom.js";

/** @import { Live } from "../messages.js" */
/** @import { App } from "./state.js" */

export class Banner {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.text = element("span");
    this.bar = element("progress", { max: 1, hidden: true, "aria-label": "Progress" });
    this.button = element("button", {
      type: "button",
      class: "cb-btn",
      hidden: true,
      onclick: () => this.accept(),
    });
    this.close = element("button", {
      type: "button",
      class: "cb-btn cb-only",
      "aria-label": "Close",
      text: "×",
      onclick: () => {
        this.node.hidden = true;
      },
    });
    this.node = element(
      "div",
      { class: "cb-banner", hidden: true, role: "status" },
      this.text,
      this.bar,
      this.button,
      this.close,
    );
  }

  accept() {
    const { offer } = this.app.live;
    if (offer) this.app.send(offer.cmd, offer.name ? { name: offer.name } : {});
  }

  /** @param {Live} live */
  show({ loading, banner, bad, progress, offer }) {
    const text = loading || banner || "";
    this.node.hidden = !text;
    this.node.className = `cb-banner${loading ? " cb-loading" : ""}${bad ? " cb-badbanner" : ""}`;
    setText(this.text, text);
    this.bar.hidden = !loading;
    if (progress !== undefined && progress >= 0) this.bar.value = progress;
    else this.bar.removeAttribute("value");
    this.close.hidden = !!loading;
    this.button.hidden = !offer;
    if (offer) setText(this.button, offer.text);
  }
}
