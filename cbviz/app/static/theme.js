// Light or dark? The user's own choice first; then JupyterLab's theme; in Voilà and elsewhere the system's preference.
import { THEMES, lum, abgr, hex, ownerPalette, stateLut } from "./color.js";
const KEY = "cbviz-theme";
export const themeChoice = () => {
  try {
    return localStorage.getItem(KEY) || "auto";
  } catch {
    return "auto";
  }
};
export function chooseTheme(v) {
  try {
    if (v === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, v);
  } catch {
    /* private mode: the choice lasts as long as the page */
  }
  chosen = v;
}
let chosen = null;
export const ownPage = () =>
  document.body.hasAttribute("data-voila") || document.body.hasAttribute("data-cbviz"); // Voilà's page, or an exported one: ours alone
function hostIsDark(el) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches;
  if (ownPage()) return system || document.body.getAttribute("data-jp-theme-light") === "false";
  const probe = document.createElement("span");
  probe.style.cssText = "display:none;color:var(--jp-layout-color0, transparent)";
  el.appendChild(probe);
  const m = /rgba?\(([\d.]+),\s*([\d.]+),\s*([\d.]+)(?:,\s*([\d.]+))?/.exec(getComputedStyle(probe).color);
  probe.remove();
  if (m && m[4] !== "0") return lum(hex(+m[1], +m[2], +m[3])) < 0.2;
  const attr = document.body.getAttribute("data-jp-theme-light");
  return attr ? attr === "false" : system;
}
export function readTheme(el) {
  const want = chosen ?? themeChoice();
  const th = { ...(want === "dark" || (want === "auto" && hostIsDark(el)) ? THEMES.dark : THEMES.light) };
  th.font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  th.lut = stateLut(th);
  th.own = ownerPalette(th);
  th.freePx = abgr(th.free);
  th.bgPx = abgr(th.bg);
  th.fgPx = abgr(th.fg);
  th.mutePx = abgr(th.mute);
  th.markPx = abgr(th.mark);
  return th;
}
export function watchTheme(cb) {
  const mo = new MutationObserver(() => setTimeout(cb, 60));
  mo.observe(document.body, {
    attributes: true,
    attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"],
  });
  const mq = matchMedia("(prefers-color-scheme: dark)");
  mq.addEventListener("change", cb);
  return () => {
    mo.disconnect();
    mq.removeEventListener("change", cb);
  };
}
