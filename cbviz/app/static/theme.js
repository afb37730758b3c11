// Light or dark? The user's own choice first; then JupyterLab's theme; in Voilà and elsewhere the system's preference.
// @ts-check
import { THEMES, luminance, abgr, hex, ownerPalette, statePixels } from "./color.js";

/** @import { Theme } from "./page.js" */

const STORED_AS = "cbviz-theme";
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** @type {string | null} chosen on this page, also where nothing can be stored */
let chosen = null;

function storedChoice() {
  try {
    return localStorage.getItem(STORED_AS) || "auto";
  } catch {
    return "auto";
  }
}

/** @param {"light" | "dark" | "auto"} choice */
export function chooseTheme(choice) {
  try {
    if (choice === "auto") localStorage.removeItem(STORED_AS);
    else localStorage.setItem(STORED_AS, choice);
  } catch {
    // private mode: the choice lasts as long as the page
  }
  chosen = choice;
}

/** Whether the page is ours alone: Voilà's, or an exported one. */
export function ownPage() {
  return document.body.hasAttribute("data-voila") || document.body.hasAttribute("data-cbviz");
}

/** @param {HTMLElement} host */
function hostIsDark(host) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches;
  const jupyter = document.body.getAttribute("data-jp-theme-light");
  if (ownPage()) return system || jupyter === "false";
  const probe = document.createElement("span");
  probe.style.cssText = "display:none;color:var(--jp-layout-color0, transparent)";
  host.appendChild(probe);
  const ground = getComputedStyle(probe).color;
  probe.remove();
  const match = /rgba?\(([\d.]+),\s*([\d.]+),\s*([\d.]+)(?:,\s*([\d.]+))?/.exec(ground);
  if (match && match[4] !== "0") {
    return luminance(hex(Number(match[1]), Number(match[2]), Number(match[3]))) < 0.2;
  }
  return jupyter ? jupyter === "false" : system;
}

/**
 * @param {HTMLElement} host the element that the page was given
 * @param {number} scale size of type
 * @returns {Theme}
 */
export function readTheme(host, scale) {
  const choice = chosen ?? storedChoice();
  const dark = choice === "dark" || (choice === "auto" && hostIsDark(host));
  const palette = dark ? THEMES.dark : THEMES.light;
  return {
    ...palette,
    font: FONT,
    scale,
    states: statePixels(palette),
    owners: ownerPalette(palette),
    freePx: abgr(palette.free),
    bgPx: abgr(palette.bg),
    fgPx: abgr(palette.fg),
    mutePx: abgr(palette.mute),
    markPx: abgr(palette.mark),
  };
}

/**
 * Tells when the surroundings may have changed their theme.
 * @param {() => void} changed
 * @returns {() => void} stops it
 */
export function watchTheme(changed) {
  const observer = new MutationObserver(() => setTimeout(changed, 60));
  observer.observe(document.body, {
    attributes: true,
    attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"],
  });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    system.removeEventListener("change", changed);
  };
}
