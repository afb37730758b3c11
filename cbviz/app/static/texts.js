// Users' texts among ours. Prompts, ids and names may hold right-to-left letters, or marks that turn the letters after them around.
// @ts-check

const TURNING =
  /[\u0590-\u08ff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufefc\ud802\ud803\ud83a\ud83b]/;
const MARKS = /[\u202a-\u202e\u2066-\u2069]/g;
const FIRST_STRONG_ISOLATE = "\u2068";
const POP_ISOLATE = "\u2069";
/** @type {Record<string, string>} */
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", $: "&#36;" };

/**
 * A name inside a sentence, a tooltip or a canvas: it keeps its own direction and leaves the text around it alone.
 * @param {string} text
 */
export function isolated(text) {
  return TURNING.test(text) ? FIRST_STRONG_ISOLATE + text.replace(MARKS, "") + POP_ISOLATE : text;
}

/**
 * A name on an axis of plotly, which reads a small markup and formulas in texts.
 * @param {string} text
 */
export function onAxis(text) {
  return isolated(text).replace(/[&<>$]/g, (c) => ENTITIES[c]);
}
