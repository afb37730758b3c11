// The explorer inside a notebook: the page, and what a notebook keeps for places without a kernel (app/alternative.py), of which only one is seen.
import { render } from "./app.js";

/** How many live views there are of each explorer that has an alternative, by the alternative's id. */
const liveViews = () => (globalThis.cbvizLive ||= new Map());

function hidingStyle(id) {
  const player = `[data-cbviz-run="${id}"]`;
  const child = ".jp-OutputArea-child";
  const style = document.createElement("style");
  style.dataset.cbvizHides = id;
  style.textContent = `${player}, ${child}:has(${player}), ${child}:has(+ ${child} ${player}) { display: none !important }`;
  return style;
}

/** The alternative goes as soon as the kernel says a word, and comes back with the last live view's end. */
function watchAlternative(model, el) {
  const id = model.get("alternative");
  if (!id) return () => {};
  const live = liveViews();
  let on = false;
  const show = () => {
    if (on) return;
    on = true;
    el.style.removeProperty("display");
    live.set(id, (live.get(id) || 0) + 1);
    if (live.get(id) === 1) document.head.append(hidingStyle(id));
  };
  // A page that nbconvert made may hold the widget's state, too: without a kernel it would stay empty.
  const kept =
    document.querySelector(`[data-cbviz-run="${id}"]`) && !document.querySelector(".jp-NotebookPanel");
  if (kept) el.style.display = "none";
  model.on("msg:custom", show);
  return () => {
    model.off("msg:custom", show);
    if (!on) return;
    live.set(id, live.get(id) - 1);
    if (!live.get(id)) document.head.querySelector(`style[data-cbviz-hides="${id}"]`)?.remove();
  };
}

export async function renderWidget(parts) {
  const stop = watchAlternative(parts.model, parts.el);
  const end = await render(parts);
  return () => {
    stop();
    if (end) end();
  };
}
