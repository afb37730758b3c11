// The top line: what is run, which step is shown, how far the requests are, how full the pool is.
// @ts-check
import { element, setText } from "../dom.js";
import { percent, significant } from "../format.js";
import { isolated } from "../texts.js";

/** @import { App } from "./state.js" */

export class Header {
  /**
   * @param {App} app
   * @param {{ themeButton: HTMLElement, presentButton: HTMLElement, help: () => void }} parts
   */
  constructor(app, { themeButton, presentButton, help }) {
    this.app = app;
    this.title = element("span", { class: "cb-what" });
    this.step = element("b", { text: "step 0" });
    this.of = element("span", { class: "cb-dim" });
    this.requests = element("span", { text: "requests 0/0" });
    this.rate = element("span");
    this.usage = element("span");
    this.stopped = element("span", { class: "cb-stopped", hidden: true });
    this.branchButton = element("button", { type: "button", class: "cb-btn cb-branch", hidden: true });
    const status = element(
      "div",
      { class: "cb-status" },
      element("span", {}, this.step, this.of),
      this.stopped,
      this.requests,
      this.rate,
      this.usage,
    );
    const helpButton = element("button", {
      type: "button",
      class: "cb-btn cb-only cb-help",
      title: "Keyboard shortcuts (?)",
      "aria-label": "Keyboard shortcuts",
      text: "?",
      onclick: help,
    });
    this.node = element(
      "header",
      { class: "cb-head" },
      element("strong", { class: "cb-brand", text: "cbviz" }),
      this.title,
      this.branchButton,
      element("span", { class: "cb-grow" }),
      status,
      presentButton,
      themeButton,
      helpButton,
    );
  }

  /** @param {string[]} parts of the title */
  drawTitle(parts) {
    const title = parts.map(isolated).join("  ·  ");
    setText(this.title, title);
    this.title.title = title;
  }

  draw() {
    const { run } = this.app;
    const event = run.event === null ? "" : ` event ${run.event}`;
    const of = run.steps > run.step ? ` of ${run.steps}` : "";
    setText(this.step, `step ${run.step}`);
    setText(this.of, event + of);
    this.drawRequests();
    const rate = run.rate();
    setText(this.rate, isFinite(rate) ? `${significant(rate)} tok/s ${run.meta.clock}` : "");
    this.rate.title = "Output tokens a second over the last 20 steps";
    const { used, total } = run.blocks.counts();
    setText(this.usage, total ? `KV ${percent(used / total)}` : "");
    this.usage.title = `${used} of ${total} blocks in use; cached blocks count as free`;
    this.drawStop();
  }

  drawRequests() {
    const { run, numRequests } = this.app;
    const { done, requests, sequences, ended } = run.count();
    setText(this.requests, `requests ${done}/${Math.max(numRequests, requests)} done`);
    this.requests.title = sequences > requests ? `${ended} of ${sequences} sequences have ended` : "";
  }

  drawStop() {
    const { run, stop } = this.app;
    const here = stop?.step === run.step ? stop : null;
    setText(this.stopped, here ? `stopped: ${here.names.map(isolated).join(", ")}` : "");
    this.stopped.hidden = !here;
    this.stopped.title = here ? here.text : "";
  }
}
