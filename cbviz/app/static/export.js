// Starts an exported page: unpacks plotly and the run, puts the stand-in where the explorer expects its kernel, and takes away what needs one.
import { unpack, Fold, Recorded } from "./recorded.js";
import { Axes } from "./axes.js";
import { render } from "./app.js";
const OURS = new Set(["Space", "→", "←", ". and ,", "Home, End", "↑ ↓", "Shift A", "P", "Esc", "?"]);
// A module of its own: a policy without unsafe-eval allows it.
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
export async function boot() {
  const el = document.getElementById("cbviz-page");
  const about = document.getElementById("cbviz-about");
  const packed = async (id) => {
    const s = document.getElementById(id);
    const b = await unpack(s.textContent);
    s.remove();
    return b;
  };
  try {
    const packedLibrary = document.getElementById("cbviz-plotly");
    const Plotly = packedLibrary ? await library(await packed("cbviz-plotly")) : Axes;
    const run = await packed("cbviz-run");
    const place = /^#step=(\d+)$/.exec(location.hash);
    const fold = new Fold(run);
    await render({ model: new Recorded(fold, place ? Number(place[1]) : undefined), el, Plotly });
    const root = el.querySelector(".cb-root");
    const reset = el.querySelector(".cb-reset");
    root.append(about);
    reset.title = "First step (Home)";
    reset.setAttribute("aria-label", "First step");
    el.querySelector(".cb-accounts").hidden = false;
    about.addEventListener("keydown", (e) => {
      if (e.key === " " || e.key === "Enter") e.stopPropagation();
    }); // they open and close the settings
    for (const row of el.querySelectorAll(".cb-keys dl > div")) {
      if (!OURS.has(row.querySelector("dt").textContent)) row.remove();
    }
    el.querySelector(".cb-keys dl > div:nth-child(2) dd").textContent = "one step on";
  } catch (e) {
    console.error(e);
    const p = document.createElement("p");
    p.className = "cb-failed";
    p.textContent = `This page could not be opened: ${(e && e.message) || e}. It needs a browser of 2023 or later.`;
    document.body.prepend(p);
  }
}
