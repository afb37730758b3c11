// A mixture's experts: a row a layer, a cell an expert. How many of the step's tokens each got, by figure and by how full its cell is; and over the run.
// @ts-check
import { element, setText } from "./dom.js";
import { grouped } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { ExpertLoad } from "./messages.js" */

/** More experts than this have no figures in their cells. */
const FEW_EXPERTS = 16;

/**
 * A layer's tokens: `over` is the busiest expert's over the mean.
 * @typedef {{ layer: number, tokens: number[], mean: number, most: number, over: number }} Layer
 */

export class ExpertPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.host = host;
    /** Tokens of all steps so far, not of one. */
    this.whole = false;
    /** @type {ExpertLoad | null} */
    this.shown = null;
    this.none = element("p", { class: "cb-empty", text: "The experts of a step appear with the first one." });
    this.choices = [
      { text: "this step", whole: false },
      { text: "so far", whole: true },
    ].map(({ text, whole }) => {
      const pressed = String(whole === this.whole);
      const onclick = () => this.choose(whole);
      return element("button", { type: "button", class: "cb-chip", text, "aria-pressed": pressed, onclick });
    });
    this.said = element("span", { class: "cb-sub" });
    this.grid = element("div", {
      class: "cb-expertgrid",
      role: "table",
      "aria-label": "Tokens of each expert",
    });
    const chips = element("div", { class: "cb-chips" }, ...this.choices);
    host.append(this.none, element("div", { class: "cb-expertshead" }, chips, this.said), this.grid);
  }

  /** @param {boolean} whole */
  choose(whole) {
    this.whole = whole;
    this.choices.forEach((button, i) => button.setAttribute("aria-pressed", String((i === 1) === whole)));
    this.shown = null;
    this.draw();
  }

  draw() {
    if (this.host.hidden) return;
    const run = this.app.current;
    const experts = run?.experts ?? null;
    this.none.hidden = !!experts;
    this.said.hidden = !experts;
    this.grid.hidden = !experts;
    if (!experts) {
      this.shown = null;
      setText(
        this.none,
        run?.step ? "Nothing was computed in this step." : "The experts of a step appear with the first one.",
      );
      return;
    }
    if (experts === this.shown) return;
    this.shown = experts;
    const layers = this.layersOf(experts);
    this.drawGrid(layers);
    this.drawWords(layers);
  }

  /**
   * @param {ExpertLoad} experts
   * @returns {Layer[]}
   */
  layersOf(experts) {
    const rows = this.whole ? experts.sum : experts.load;
    return rows.map((tokens, i) => {
      const total = tokens.reduce((sum, number) => sum + number, 0);
      const mean = total / tokens.length;
      const most = Math.max(...tokens, 1);
      return { layer: experts.layers[i], tokens, mean, most, over: total ? most / mean : 0 };
    });
  }

  /** @param {Layer[]} layers */
  drawGrid(layers) {
    const numExperts = layers[0].tokens.length;
    const few = numExperts <= FEW_EXPERTS;
    this.grid.style.setProperty("--cb-e", String(numExperts));
    const rows = layers.map((layer) => layerRow(layer, few));
    if (few) rows.unshift(headRow(numExperts));
    this.grid.replaceChildren(...rows);
  }

  /** @param {Layer[]} layers */
  drawWords(layers) {
    const cells = layers.length * layers[0].tokens.length;
    const touched = layers.reduce((sum, { tokens }) => sum + tokens.filter((number) => number).length, 0);
    const uneven = layers.reduce((sum, { over }) => sum + over / layers.length, 0);
    const when = this.whole ? "in the steps so far" : "in this step";
    setText(this.said, `${touched} of ${cells} ${this.whole ? "used" : "touched"}, counted`);
    this.said.title =
      `Counted: ${touched} of the ${cells} experts of all layers got a token ${when}; ` +
      `the busiest of a layer got ${uneven.toFixed(1)} times the layer's mean. Only the weights of touched experts are read.`;
  }
}

/** @param {number} numExperts */
function headRow(numExperts) {
  const names = Array.from({ length: numExperts }, (_, expert) =>
    element("b", { role: "columnheader", text: String(expert) }),
  );
  return element(
    "div",
    { class: "cb-expertrow cb-expertnames", role: "row" },
    element("span", { class: "cb-expertlayer", role: "columnheader", text: "expert" }),
    element("div", { class: "cb-expertcells", role: "presentation" }, ...names),
    element("span", {
      class: "cb-expertover",
      role: "columnheader",
      text: "peak",
      title: "The busiest expert over the mean of its layer",
    }),
  );
}

/**
 * @param {Layer} layer
 * @param {boolean} figures
 */
function layerRow({ layer, tokens, mean, most, over }, figures) {
  const cells = tokens.map((number, expert) => {
    const much = number ? `, ${(number / mean).toFixed(1)} times the mean` : ", its weights were not read";
    const count = `${grouped(number)} token${number === 1 ? "" : "s"}`;
    return element("span", {
      class: number ? "" : "cb-idle",
      role: "cell",
      style: `--f:${Math.round((100 * number) / most)}%`,
      title: `layer ${layer}, expert ${expert}: ${count}${much}`,
      text: figures ? grouped(number) : "",
    });
  });
  return element(
    "div",
    { class: "cb-expertrow", role: "row" },
    element("span", { class: "cb-expertlayer", role: "rowheader", text: `layer ${layer}` }),
    element("div", { class: "cb-expertcells", role: "presentation" }, ...cells),
    element("span", {
      class: "cb-expertover",
      title: "The busiest expert's tokens over the mean of the layer: 1 is even",
      text: over ? `${over.toFixed(1)}×` : "",
    }),
  );
}
