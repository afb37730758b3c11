// Compared runs in words and figures: a table of metrics, and for each run but the first where it parts from that one and why.
// @ts-check
import { element } from "./dom.js";
import { cut, grouped } from "./format.js";
import { METRICS } from "./metrics.js";
import { sentenceLines } from "./sentences.js";
import { isolated } from "./texts.js";

/** @import { App } from "./page/state.js" */
/** @import { Compared, Pair, Parting, Sentence } from "./messages.js" */

/** @type {Record<string, string>} short titles of metrics that the Metrics panel has not */
const MORE_TITLES = {
  num_steps: "steps",
  num_finished: "finished",
  num_aborted: "aborted",
  total_throughput: "in + out",
  p99_itl_s: "ITL p99",
  padded_tokens: "padded",
  kv_usage_peak: "KV held, peak",
  goodput: "goodput",
};

/**
 * @param {Compared} compared
 * @returns {HTMLElement[]} the table's head and body
 */
export function metricsTable({ runs, rows }) {
  const names = runs.map(({ name }) =>
    element("th", { scope: "col", dir: "auto", text: cut(name, 24), title: name }),
  );
  const lines = rows.map(({ key, title, cells, ratios }) => {
    const short = METRICS[key]?.title ?? MORE_TITLES[key] ?? title;
    const figures = cells.map((cell, i) => {
      const ratio = i ? element("em", { text: ratioText(cell === cells[0], ratios[i - 1]) }) : null;
      return element("td", {}, cell.replace("tokens/s", "tok/s"), ratio);
    });
    return element(
      "tr",
      { "data-metric": key },
      element("th", { scope: "row", text: short, title }),
      ...figures,
    );
  });
  return [element("thead", {}, element("tr", {}, element("th"), ...names)), element("tbody", {}, ...lines)];
}

/**
 * @param {boolean} same
 * @param {number | null} ratio
 */
function ratioText(same, ratio) {
  if (same) return "=";
  if (ratio === null || ratio > 100 || ratio < 0.01) return "";
  return `${ratio.toFixed(2)}×`;
}

/**
 * One run against the first.
 * @param {App} app
 * @param {Pair} pair
 * @param {string} first name of the first run
 * @param {(step: number) => void} go
 */
export function pairSection(app, pair, first, go) {
  const causes = pair.causes.length
    ? element(
        "div",
        {},
        element("p", { class: "cb-sub", text: "What the difference comes from" }),
        sentenceList(app, pair.causes),
      )
    : null;
  // The clocks are told of above the pairs already.
  const notes = pair.notes
    .filter((text) => !text.startsWith("times"))
    .map((text) => element("p", { class: "cb-note", text }));
  return element(
    "section",
    { class: "cb-pair", "data-pair": pair.name },
    element("h2", { text: `${isolated(pair.name)} against ${isolated(first)}` }),
    tokensVerdict(pair),
    schedulesVerdict(app, pair, first, go),
    causes,
    ...notes,
  );
}

/** @param {Pair} pair */
function tokensVerdict({ tokens_equal, partial, proof }) {
  const text = proof || "tokens were not recorded";
  if (tokens_equal) return element("p", { class: "cb-proof cb-s-good", text: `✓ ${text}` });
  if (partial) return element("p", { class: "cb-proof ", text });
  return element("p", { class: "cb-proof cb-s-bad", text: `✗ ${text}` });
}

/**
 * @param {App} app
 * @param {Pair} pair
 * @param {string} first
 * @param {(step: number) => void} go
 */
function schedulesVerdict(app, pair, first, go) {
  if (pair.so_far !== null) {
    const text = `schedules and block tables are equal up to step ${grouped(pair.so_far)}, as far as both have come`;
    return element("p", { class: "cb-proof", text });
  }
  if (!pair.parting) {
    const text = "✓ schedules and block tables are equal, step by step";
    return element("p", { class: "cb-proof cb-s-good", text });
  }
  return partingBox(app, pair, pair.parting, first, go);
}

/** @param {Pair} pair */
function whatParts({ schedules_equal, blocks_equal }) {
  if (!schedules_equal) return "Schedules";
  return blocks_equal ? "Configurations" : "Block tables";
}

/**
 * @param {App} app
 * @param {Pair} pair
 * @param {Parting} parting
 * @param {string} first
 * @param {(step: number) => void} go
 */
function partingBox(app, pair, { step, changed, ours, theirs }, first, go) {
  const goButton = element("button", {
    type: "button",
    class: "cb-btn cb-small cb-goparting",
    text: "Go there",
    onclick: () => go(step),
  });
  const title = element("b", { text: `${whatParts(pair)} part at step ${grouped(step)} ` });
  const changes = changed.length ? element("p", { class: "cb-note", text: changed.join("; ") }) : null;
  return element(
    "div",
    { class: "cb-parting" },
    element("p", {}, title, goButton),
    changes,
    side(app, first, ours),
    side(app, pair.name, theirs),
  );
}

/**
 * What one run did at the step at which they part.
 * @param {App} app
 * @param {string} name
 * @param {Sentence[]} sentences
 */
function side(app, name, sentences) {
  if (!sentences.length) return null;
  return element("div", {}, element("p", { class: "cb-sub", text: name }), sentenceList(app, sentences));
}

/**
 * @param {App} app
 * @param {Sentence[]} sentences
 */
function sentenceList(app, sentences) {
  return element("ol", { class: "cb-sentences" }, ...sentenceLines(app, sentences));
}
