// @ts-check
// What Voilà's page does itself, without a script inside the page: progress until it is drawn, and a notice when its kernel has ended.
import { watchKernel } from "./kernel.js";

/** @type {any} */
const page = window;
const TEXTS = {
  "": "",
  lost: "The connection to the server is lost. Trying again.",
  unreachable:
    "The Python process behind this page (its kernel) has ended. Reload the page: the explorer comes back with its saved run.",
  ended:
    "The Python process behind this page (its kernel) has ended. Reload the page: the explorer comes back with its saved run.",
};

let leaving = false;
addEventListener("pagehide", () => {
  leaving = true;
});
addEventListener("pageshow", () => {
  leaving = false;
});

/**
 * Shows a notice, or takes it away.
 * @param {string} text
 */
function notice(text) {
  if (leaving) return;
  let box = document.getElementById("cb-ended");
  if (!text) {
    box?.remove();
    return;
  }
  if (!box) {
    const again = Object.assign(document.createElement("button"), {
      type: "button",
      textContent: "Reload",
      onclick: () => location.reload(),
    });
    box = document.body.appendChild(
      Object.assign(document.createElement("div"), { id: "cb-ended", role: "alert" }),
    );
    box.append(document.createElement("span"), again);
  }
  const words = /** @type {HTMLElement} */ (box.firstChild);
  words.textContent = text;
}

/**
 * ipywidgets 8.1.9 looks for a widget every 0.1 s, for 2 s, and not again when they are over: one that came during its last sleep is "not found".
 * @param {any} manager
 */
function findLateWidgets(manager) {
  const get = manager.get_model;
  manager.get_model = async (/** @type {string} */ id) => {
    try {
      return await get.call(manager, id);
    } catch (e) {
      if (manager.has_model(id)) return get.call(manager, id);
      throw e;
    }
  };
}

/** @param {any} value Voilà's application */
function adopt(value) {
  const manager = value?.widgetManager;
  if (!manager?.kernel) return;
  findLateWidgets(manager);
  watchKernel(manager.kernel, (state) => notice(TEXTS[state]));
}

// Voilà sets it just before it draws the first widget.
let app = page.jupyterapp;
adopt(app);
Object.defineProperty(page, "jupyterapp", {
  configurable: true,
  get: () => app,
  set(value) {
    app = value;
    adopt(value);
  },
});
