// Starts an exported page: unpacks plotly and the run, puts the stand-in where the explorer expects its kernel, and takes away what needs one.
// @ts-check
import { Fold } from "./fold.js";
import { unpack, Recorded } from "./recorded.js";
import { Axes } from "./axes.js";
import { render } from "./app.js";

/** @import { PlotlyLibrary } from "./page.js" */

/** Keys that work without a kernel. */
const KEYS_WITHOUT_KERNEL = new Set([
  "Space",
  "→",
  "←",
  ". and ,",
  "Home, End",
  "↑ ↓",
  "Shift A",
  "P",
  "Esc",
  "?",
]);

/**
 * A module of its own: a policy without unsafe-eval allows it.
 * @param {Uint8Array<ArrayBuffer>} source
 * @returns {Promise<PlotlyLibrary>}
 */
async function library(source) {
  const parts = [
    "const m={exports:{}};(function(module,exports,define){",
    source,
    "\n}).call(globalThis,m,m.exports,undefined);export default m.exports;",
  ];
  const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

/**
 * An element that the page is known to have.
 * @param {Document | HTMLElement} where
 * @param {string} selector
 * @returns {HTMLElement}
 */
function find(where, selector) {
  const found = /** @type {HTMLElement | null} */ (where.querySelector(selector));
  if (!found) throw new Error(`the page has no ${selector}`);
  return found;
}

/**
 * What a script of the page holds, unpacked; the script goes.
 * @param {string} id
 */
async function takePacked(id) {
  const script = find(document, `#${id}`);
  const bytes = await unpack(script.textContent ?? "");
  script.remove();
  return bytes;
}

/**
 * Takes away what needs a kernel.
 * @param {HTMLElement} page
 */
function leaveOutTheKernel(page) {
  const reset = find(page, ".cb-reset");
  reset.title = "First step (Home)";
  reset.setAttribute("aria-label", "First step");
  find(page, ".cb-accounts").hidden = false;
  find(page, ".cb-keys dl > div:nth-child(2) dd").textContent = "one step on";
  for (const row of page.querySelectorAll(".cb-keys dl > div")) {
    const keys = row.querySelector("dt")?.textContent ?? "";
    if (!KEYS_WITHOUT_KERNEL.has(keys)) row.remove();
  }
}

export async function boot() {
  try {
    const page = find(document, "#cbviz-page");
    const about = find(document, "#cbviz-about");
    const hasPlotly = document.getElementById("cbviz-plotly");
    const Plotly = hasPlotly ? await library(await takePacked("cbviz-plotly")) : Axes;
    const fold = new Fold(await takePacked("cbviz-run"));
    const step = /^#step=(\d+)$/.exec(location.hash)?.[1];
    const model = new Recorded(fold, step ? Number(step) : undefined);
    await render({ model, el: page, Plotly });
    find(page, ".cb-root").append(about);
    about.addEventListener("keydown", (event) => {
      // These keys open and close the settings.
      if (event.key === " " || event.key === "Enter") event.stopPropagation();
    });
    leaveOutTheKernel(page);
  } catch (error) {
    console.error(error);
    const reason = error instanceof Error ? error.message : String(error);
    const line = document.createElement("p");
    line.className = "cb-failed";
    line.textContent = `This page could not be opened: ${reason}. It needs a browser of 2023 or later.`;
    document.body.prepend(line);
  }
}
