// Sentences about steps, with the ids of requests in them as buttons.
// @ts-check
import { element } from "./dom.js";

/** @import { App } from "./page/state.js" */
/** @import { Sentence } from "./messages.js" */

/** @type {Record<string, "good" | "bad" | "warn" | "wait">} */
const TONES = {
  preempted: "bad",
  unscheduled: "bad",
  refused: "bad",
  not_admitted: "wait",
  notadmitted: "wait",
  waits: "wait",
  evicted: "warn",
  prefix_miss: "warn",
  prefixmiss: "warn",
  prefix_hit: "good",
  prefixhit: "good",
  finished: "good",
  admitted: "good",
};
const WORD = /[\w-]/;

/**
 * Where an id stands in a text as a whole word; -1: nowhere.
 * @param {string} text
 * @param {string} id
 */
function findWord(text, id) {
  for (let at = text.indexOf(id); at >= 0; at = text.indexOf(id, at + 1)) {
    if (!WORD.test(text[at - 1] || " ") && !WORD.test(text[at + id.length] || " ")) return at;
  }
  return -1;
}

/**
 * The id that stands first in a text; of two at one place the longer one, which comes first in `ids`.
 * @param {string} text
 * @param {string[]} ids
 */
function firstId(text, ids) {
  let first = null;
  for (const id of ids) {
    const at = findWord(text, id);
    if (at >= 0 && (!first || at < first.at)) first = { id, at };
  }
  return first;
}

/**
 * A sentence with its request ids as buttons.
 * @param {App} app
 * @param {string} text
 * @param {string[]} ids
 * @returns {(string | HTMLElement)[]}
 */
export function sentence(app, text, ids) {
  const known = ids.filter((id) => app.run.index.has(id)).sort((a, b) => b.length - a.length);
  const parts = [];
  let rest = text;
  for (let found = firstId(rest, known); found; found = firstId(rest, known)) {
    const { id, at } = found;
    parts.push(rest.slice(0, at), idButton(app, id));
    rest = rest.slice(at + id.length);
  }
  return [...parts, rest];
}

/**
 * @param {App} app
 * @param {string} id
 */
function idButton(app, id) {
  const row = app.run.index.get(id) ?? -1;
  return element("button", {
    type: "button",
    class: "cb-id",
    dir: "auto",
    text: id,
    onclick: () => app.select(row),
  });
}

/**
 * Lines of a list.
 * @param {App} app
 * @param {Sentence[]} sentences
 */
export function sentenceLines(app, sentences) {
  return sentences.map(({ kind, text, ids }) =>
    element(
      "li",
      { class: "cb-s-" + (TONES[kind] ?? "plain"), "data-kind": kind },
      ...sentence(app, text, ids),
    ),
  );
}
