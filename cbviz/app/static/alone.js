// A request among others against the same request alone: sentences, a map of layers and positions, and one step operator by operator.
// @ts-check
import { AloneMap, cellAt, tiny } from "./alonemap.js";
import { element, setText } from "./dom.js";
import { grouped } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Alone, AloneToken } from "./messages.js" */

/** @type {Record<string, string>} */
const OPERATOR_TEXT = {
  qkv: "product: queries, keys, values",
  o: "product: back from the heads",
  gate_up: "product: gate and up",
  down: "product: down",
  head: "product: logits",
};
const COLUMNS = ["layer", "what", "largest difference", "units in the last place", "numbers that differ"];

export class AloneView {
  /**
   * @param {App} app
   * @param {HTMLElement} root
   * @param {HTMLButtonElement} button
   */
  constructor(app, root, button) {
    this.app = app;
    this.button = button;
    /** @type {Alone | null} */
    this.shown = null;
    this.title = element("h2");
    this.list = element("ol", { class: "cb-sentences cb-alonesaid" });
    this.map = new AloneMap();
    this.at = element("p", { class: "cb-note", text: "Point at the map to read a cell." });
    this.operatorsTitle = element("h3");
    this.operators = element("table", { class: "cb-cmptable cb-aloneops" });
    this.operatorsBox = element("div", { class: "cb-aloneopsbox", tabindex: "0" }, this.operators);
    this.box = element(
      "dialog",
      { class: "cb-dialog cb-alone", "aria-label": "A request alone and among others" },
      this.title,
      this.list,
      element("h3", { text: "Keys and values in the cache: layers down, positions across" }),
      this.map.canvas,
      this.map.key,
      this.at,
      this.operatorsTitle,
      this.operatorsBox,
      element("button", {
        type: "button",
        class: "cb-btn cb-aloneclose",
        text: "Close",
        onclick: () => this.box.close(),
      }),
    );
    root.append(this.box);
    button.addEventListener("click", () => {
      if (app.selected >= 0) app.send("alone", { id: app.run.id(app.selected) });
    });
    this.map.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.box.addEventListener("close", () => button.focus({ preventScroll: true }));
    this.sizes = new ResizeObserver(() => this.paintMap());
    this.sizes.observe(this.map.canvas);
  }

  /** The button is there for a request of which something was really computed. */
  draw() {
    const { run, selected, live } = this.app;
    const request = selected >= 0 ? run.rows[selected] : null;
    this.button.hidden = !request || !live.alone;
    this.button.disabled = !request?.computed || !!live.loading;
  }

  /** @param {Alone} message */
  show(message) {
    this.shown = message;
    setText(this.title, `${message.id} among others and alone`);
    this.drawSentences(message);
    this.drawOperators(message);
    if (!this.box.open) this.box.showModal();
    this.paintMap();
    this.app.say(message.sentences[0]);
  }

  paintMap() {
    if (this.shown) this.map.paint(this.shown, this.app.theme.font);
  }

  /** @param {Alone} message */
  drawSentences({ sentences, equal }) {
    const [first, ...others] = sentences;
    const verdict = element("li", {
      class: equal ? "cb-s-good" : "cb-s-bad",
      text: (equal ? "✓ " : "≠ ") + first,
    });
    this.list.replaceChildren(verdict, ...others.map((text) => element("li", { text })));
  }

  /** @param {Alone} message */
  drawOperators({ step, ops, rows }) {
    const first = ops.findIndex(([, , difference]) => difference > 0);
    const oneCall = ops.length > 1 && ops[0][1] === "keys and values";
    const how = oneCall ? "layer by layer (the pass is one compiled call)" : "operator by operator";
    const equal = first < 0 ? "; nothing differs" : "";
    setText(
      this.operatorsTitle,
      `Step ${grouped(step)}, ${how}: ${rows[0]} rows among others, ${rows[1]} alone${equal}`,
    );
    this.operatorsBox.hidden = first < 0;
    const head = COLUMNS.map((text) => element("th", { scope: "col", text }));
    const body = ops.map((operator, i) => operatorRow(operator, i === first));
    this.operators.replaceChildren(
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...body),
    );
  }

  /** @param {MouseEvent} event */
  hover(event) {
    if (!this.shown) return;
    const { apart } = this.shown;
    const { left, top, width, height } = this.map.area();
    const x = event.clientX - left;
    const y = event.clientY - top;
    const cell = cellAt(x, y, width, height, apart.length, apart[0].length);
    if (cell) setText(this.at, describeCellAlone(this.shown, cell[0], cell[1]));
  }

  destroy() {
    this.sizes.disconnect();
  }
}

/**
 * @param {Alone["ops"][number]} operator
 * @param {boolean} isFirst the first that differs
 */
function operatorRow([layer, operator, difference, ulps, share], isFirst) {
  const name = OPERATOR_TEXT[operator] ?? operator;
  return element(
    "tr",
    { class: isFirst ? "cb-alonefirst" : "" },
    element("th", { scope: "row", text: layer < 0 ? "" : String(layer) }),
    element("td", { text: name + (isFirst ? " ← the first" : "") }),
    element("td", { text: difference ? tiny(difference) : "equal" }),
    element("td", { text: difference ? tiny(ulps) : "" }),
    element("td", { text: difference ? `${(100 * share).toFixed(0)} %` : "" }),
  );
}

/**
 * @param {Alone} message
 * @param {number} layer
 * @param {number} position
 */
function describeCellAlone(message, layer, position) {
  const chunk = message.chunks.findLast(([start]) => start <= position);
  const token = message.tokens.find((other) => other.position === position + 1);
  const part = position < message.num_prompt ? "prompt" : "output";
  const step = chunk?.[1];
  const origin = step ? `computed in step ${grouped(step)}` : "from the prefix cache";
  const difference = differenceText(message.apart[layer][position], message.ulps[layer][position]);
  const next = token ? tokenText(token) : "";
  return `layer ${layer}, position ${position} (${part}, ${origin}): ${difference}${next}`;
}

/**
 * @param {number | null} apart
 * @param {number | null} ulps
 */
function differenceText(apart, ulps) {
  if (apart === null) return "no longer in the cache";
  if (apart === 0) return "equal, bit for bit";
  return `keys and values differ by up to ${tiny(apart)}, ${tiny(ulps ?? 0)} units in the last place`;
}

/** @param {AloneToken} token */
function tokenText({ text, text_alone, apart, gap, changed }) {
  const probability = apart ? `differs by ${tiny(apart)} nats` : "equal";
  const other = changed ? `; alone “${text_alone}”` : "";
  return `; then “${text}”, log-probability ${probability}, lead ${tiny(gap)} nats${other}`;
}
