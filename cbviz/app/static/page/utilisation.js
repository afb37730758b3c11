// The utilisation panel: lines over steps, or in their place the roofline, the inside of a step, a mixture's experts, or the accounts.
// @ts-check
import { AccountPanel } from "../account.js";
import { element, icon, ICON, setText } from "../dom.js";
import { ExpertPanel } from "../experts.js";
import { InsidePanel } from "../inside.js";
import { describeRoof } from "../roofpoints.js";

/** @import { Live } from "../messages.js" */
/** @import { WordPanel } from "../page.js" */
/** @import { Panel } from "./layout.js" */
/** @import { App } from "./state.js" */

/** @typedef {"roof" | "inside" | "experts" | "accounts"} Mode */

/**
 * What can stand in place of the lines.
 * @typedef {{ tab: HTMLButtonElement, body: HTMLElement, title: string, words?: WordPanel }} Alternative
 */

const MEASURE_TITLE =
  "Measures memory bandwidth and arithmetic, about two seconds: the peaks that utilisation is told against (cbviz calibrate)";

export class UtilisationPanel {
  /**
   * @param {App} app
   * @param {Panel} panel
   */
  constructor(app, panel) {
    this.app = app;
    this.panel = panel;
    /** @type {Mode | null} null: the lines */
    this.mode = null;
    this.title = "Utilisation";
    /** Of which peaks the figures are shares. */
    this.ofPeaks = "";
    this.footKey = "";
    this.seriesHost = element("div", { class: "cb-plot" });
    this.roofHost = element("div", { class: "cb-plot cb-roof", hidden: true });
    const accountHost = element("div", { class: "cb-account", hidden: true });
    const expertHost = element("div", { class: "cb-account cb-experts", hidden: true });
    const insideHost = element("div", { class: "cb-account cb-inside", hidden: true });
    this.account = new AccountPanel(accountHost, app);
    this.experts = new ExpertPanel(expertHost, app);
    this.inside = new InsidePanel(insideHost, app);
    this.accountTab = this.tab("accounts", {
      class: "cb-tool cb-accounts",
      hidden: true,
      "aria-label": "Accounts",
      title: "Accounts: where the step's tokens and the pool's slots are, to the last one (Shift A)",
    });
    this.accountTab.append(icon(ICON.bars, 12));
    this.expertTab = this.tab("experts", {
      class: "cb-tool cb-expertstab",
      hidden: true,
      text: "Experts",
      title: "Experts: tokens of each in this step, layer by layer, in place of utilisation (Shift X)",
    });
    this.roofTab = this.tab("roof", {
      class: "cb-tool cb-rooftab",
      text: "Roof",
      title:
        "Roofline: is a step limited by reading memory or by arithmetic, and how near to the limit is it? (Shift U)",
    });
    this.insideTab = this.tab("inside", {
      class: "cb-tool cb-insidetab",
      text: "Inside",
      title: "Inside a step: its operators or kernels, and how long each took (Shift I)",
    });
    /** @type {Record<Mode, Alternative>} */
    this.alternatives = {
      roof: { tab: this.roofTab, body: this.roofHost, title: "Roof" },
      inside: { tab: this.insideTab, body: insideHost, title: "Inside a step", words: this.inside },
      experts: { tab: this.expertTab, body: expertHost, title: "Experts", words: this.experts },
      accounts: { tab: this.accountTab, body: accountHost, title: "Accounts", words: this.account },
    };
    this.footText = element("div", { class: "cb-note cb-utiltext" });
    this.measureButton = element("button", {
      type: "button",
      class: "cb-btn cb-small cb-calibrate",
      hidden: true,
      onclick: () => app.send("calibrate"),
    });
    this.foot = element("div", { class: "cb-utilfoot" }, this.footText, this.measureButton);
    this.roofKey = element("span", {}, roofSign("decode"), "decode", roofSign("prefill"), "prefill");
    this.counted = element("span", { text: "counted" });
    panel.body.append(this.seriesHost, this.roofHost, insideHost, accountHost, expertHost);
    panel.addTools(this.roofTab, this.insideTab, this.expertTab, this.accountTab);
    panel.node.append(this.foot);
    panel.subtitle.append(this.roofKey, this.counted);
    this.drawTitle();
  }

  /**
   * @param {Mode} mode
   * @param {Record<string, unknown>} attributes
   */
  tab(mode, attributes) {
    const onclick = () => this.toggle(mode);
    return element("button", { type: "button", "aria-pressed": "false", ...attributes, onclick });
  }

  /** Whether the lines are shown. */
  get showsSeries() {
    return !this.mode;
  }

  /**
   * Shows something in place of the lines, or the lines again.
   * @param {Mode} mode
   */
  toggle(mode) {
    const before = this.mode;
    this.mode = before === mode ? null : mode;
    for (const [name, { tab, body }] of Object.entries(this.alternatives)) {
      tab.setAttribute("aria-pressed", String(name === this.mode));
      body.hidden = name !== this.mode;
    }
    this.seriesHost.hidden = !!this.mode;
    this.foot.hidden = !!this.mode && this.mode !== "roof";
    this.drawTitle();
    const { app } = this;
    app.views?.roofline.show(this.mode === "roof");
    if (!this.mode) app.views?.series.advance();
    const accounts = this.mode === "accounts";
    if (accounts || before === "accounts") app.send("account", { on: accounts });
    if (app.current) {
      if (this.mode) this.alternatives[this.mode].words?.draw();
      this.draw();
    }
    app.markDirty();
  }

  drawTitle() {
    const { current: run } = this.app;
    setText(this.panel.title, this.mode ? this.alternatives[this.mode].title : this.title);
    this.roofKey.hidden = this.mode !== "roof";
    // Beside a mixture's tabs there is no room for it.
    const crowded = !!run?.mixture && !this.app.isEnlarged("util");
    this.counted.hidden = this.mode !== "accounts" || crowded;
  }

  /** Another run: other peaks. */
  restart() {
    const { meta } = this.app.run;
    const asShare = !!this.app.views?.series.asShare;
    this.title = asShare ? shareTitle(meta.clock, meta.peaks_measured) : "Utilisation";
    this.ofPeaks = asShare
      ? `of the ${meta.peaks_measured ? "measured" : "data-sheet"} peak of ${meta.device || "the device"}`
      : "no peak is known for this device";
    this.panel.title.title = this.ofPeaks;
    this.app.views?.roofline.show(this.mode === "roof");
    this.drawTitle();
  }

  /** @param {Live} live */
  showLive({ can_calibrate, loading }) {
    this.measureButton.hidden = !can_calibrate;
    this.measureButton.disabled = !!loading;
    this.measureButton.title = MEASURE_TITLE;
  }

  draw() {
    const { mixture } = this.app.run;
    if (this.expertTab.hidden === mixture) {
      this.expertTab.hidden = !mixture;
      if (!mixture && this.mode === "experts") this.toggle("experts");
    }
    this.drawMeasure();
    this.drawFoot();
  }

  drawMeasure() {
    const { run, views } = this.app;
    const tooLow = run.step > 0 && !!views?.series.abovePeak(run.step);
    let text = "Measure the peaks again";
    if (!run.peaksKnown) text = "Measure this machine";
    else if (tooLow) text = "Peak too low: measure";
    this.measureButton.classList.toggle("cb-unknown", !run.peaksKnown || tooLow);
    setText(this.measureButton, text);
  }

  /** The step's figures below the lines or the roof. */
  drawFoot() {
    const parts = this.footParts();
    const key = parts.join("|");
    if (this.footKey === key) return;
    this.footKey = key;
    this.footText.replaceChildren(
      ...parts.flatMap(([sign, text], i) => [
        i ? ", " : "",
        ...(sign ? [element("i", { class: sign, "aria-hidden": "true" })] : []),
        text,
      ]),
    );
    const how = this.app.run.meta.clock === "modelled" ? "Modelled" : "Achieved";
    this.footText.title = `${how}, ${this.ofPeaks}: ${this.footText.textContent}`;
  }

  /** @returns {[sign: string, text: string][]} */
  footParts() {
    const { run, views } = this.app;
    if (!views) return [];
    if (this.mode !== "roof") return views.series.parts(run.step);
    return run.step ? [["", describeRoof(run, run.step)]] : [];
  }

  destroy() {
    this.inside.destroy();
  }
}

/** @param {"decode" | "prefill"} phase */
function roofSign(phase) {
  return element("i", { class: `cb-dotsign cb-sign-${phase}`, "aria-hidden": "true" });
}

/**
 * @param {string} clock
 * @param {boolean} measured
 */
function shareTitle(clock, measured) {
  if (clock === "modelled") return "Of peak, modelled";
  return measured ? "Of measured peak" : "Of data-sheet peak";
}
