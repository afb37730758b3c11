// The page's colours and size of type: as the user or the surroundings want them.
// @ts-check
import { Presenter } from "../classroom.js";
import { element, setText } from "../dom.js";
import { chooseTheme, ownPage, readTheme, watchTheme } from "../theme.js";

/** @import { Theme } from "../page.js" */
/** @import { App } from "./state.js" */

export class Appearance {
  /**
   * @param {App} app
   * @param {HTMLElement} host the element that the page was given
   * @param {HTMLElement} root
   * @param {{ painted: () => void, changed: () => void }} listeners
   *   `painted`: the colours of the page were set; `changed`: all of it is to be drawn again
   */
  constructor(app, host, root, { painted, changed }) {
    this.app = app;
    this.host = host;
    this.root = root;
    this.painted = painted;
    this.changed = changed;
    this.dead = false;
    this.themeButton = element("button", {
      type: "button",
      class: "cb-btn cb-theme",
      onclick: () => {
        chooseTheme(app.theme.dark ? "light" : "dark");
        this.refresh();
      },
    });
    this.presenter = new Presenter(root, () => this.refresh(), ownPage());
    this.unwatch = () => {};
  }

  /** Once the page is built. */
  begin() {
    this.unwatch = watchTheme(() => this.refresh());
    this.paint();
    this.presenter.begin();
  }

  /** Reads the theme again, and repaints the page if it is another one. */
  async refresh() {
    if (this.dead) return;
    const { app } = this;
    const theme = readTheme(this.host, this.presenter.scale);
    const same = theme.dark === app.theme.dark && theme.scale === app.theme.scale;
    if (same && app.views) return;
    app.theme = theme;
    this.paint();
    await app.views?.retheme(theme);
    this.changed();
  }

  paint() {
    const { theme } = this.app;
    const { style } = this.root;
    for (const [name, color] of Object.entries(pageColors(theme))) style.setProperty("--cb-" + name, color);
    style.colorScheme = theme.dark ? "dark" : "light";
    style.fontFamily = theme.font;
    this.root.setAttribute("data-theme", theme.dark ? "dark" : "light");
    setText(this.themeButton, theme.dark ? "Light" : "Dark");
    this.themeButton.title = `Switch to the ${theme.dark ? "light" : "dark"} theme`;
    if (ownPage()) {
      document.body.style.background = theme.page;
      document.documentElement.style.colorScheme = style.colorScheme;
    }
    this.painted();
  }

  destroy() {
    this.dead = true;
    this.unwatch();
  }
}

/**
 * The colours that explorer.css uses, by name.
 * @param {Theme} theme
 * @returns {Record<string, string>}
 */
function pageColors(theme) {
  const { owners, state, lines } = theme;
  return {
    bg: theme.bg,
    page: theme.page,
    fg: theme.fg,
    mute: theme.mute,
    line: theme.line,
    track: theme.track,
    accent: theme.accent,
    onaccent: theme.onAccent,
    bad: theme.bad,
    hot: theme.hot,
    mark: theme.mark,
    tip: theme.tip,
    tipfg: theme.tipfg,
    free: theme.free,
    used: owners.css[0],
    tint: owners.tint[0],
    ink: owners.ink[0],
    prefill: state.prefill[0],
    decode: state.decode[0],
    warn: state.preempted[0],
    l0: lines[0],
    l1: lines[1],
    good: theme.dark ? "#5dbb8a" : "#1a7f4b",
  };
}
