// The explorer inside a notebook: the page, and what a notebook keeps for places without a kernel (app/alternative.py), of which only one is seen.
// @ts-check
import { render } from "./app.js";

/** @import { KernelModel } from "./messages.js" */
/** @import { PlotlyLibrary } from "./page.js" */

/**
 * How many live views there are of each explorer that has an alternative, by the alternative's id. Widgets load
 * this script once each, so the number stands in the window.
 * @returns {Map<unknown, number>}
 */
function liveViews() {
  const page = /** @type {{ cbvizLive?: Map<unknown, number> }} */ (globalThis);
  page.cbvizLive ??= new Map();
  return page.cbvizLive;
}

/** @param {string} id of the alternative */
function hidingStyle(id) {
  const player = `[data-cbviz-run="${id}"]`;
  const child = ".jp-OutputArea-child";
  const style = document.createElement("style");
  style.dataset.cbvizHides = id;
  style.textContent = `${player}, ${child}:has(${player}), ${child}:has(+ ${child} ${player}) { display: none !important }`;
  return style;
}

/**
 * The alternative goes as soon as the kernel says a word, and comes back with the last live view's end.
 * @param {KernelModel} model
 * @param {HTMLElement} host
 * @returns {() => void} ends this view
 */
function watchAlternative(model, host) {
  const id = model.get("alternative");
  if (typeof id !== "string" || !id) return () => {};
  const live = liveViews();
  let shown = false;
  const show = () => {
    if (shown) return;
    shown = true;
    host.style.removeProperty("display");
    const views = (live.get(id) ?? 0) + 1;
    live.set(id, views);
    if (views === 1) document.head.append(hidingStyle(id));
  };
  // A page that nbconvert made may hold the widget's state, too: without a kernel it would stay empty.
  const kept =
    document.querySelector(`[data-cbviz-run="${id}"]`) && !document.querySelector(".jp-NotebookPanel");
  if (kept) host.style.display = "none";
  model.on("msg:custom", show);
  return () => {
    model.off("msg:custom", show);
    if (!shown) return;
    const views = (live.get(id) ?? 1) - 1;
    live.set(id, views);
    if (!views) document.head.querySelector(`style[data-cbviz-hides="${id}"]`)?.remove();
  };
}

/** @param {{ model: KernelModel, el: HTMLElement, Plotly: PlotlyLibrary }} given */
export async function renderWidget(given) {
  const stop = watchAlternative(given.model, given.el);
  const end = await render(given);
  return () => {
    stop();
    end();
  };
}
