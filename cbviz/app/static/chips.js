// A request as a button: its colour, its id. A click picks it, another one lets it go.
// @ts-check
import { STATES, STATE_TEXT } from "./color.js";
import { element, setText, sync } from "./dom.js";
import { grouped } from "./format.js";

/** @import { App } from "./page/state.js" */

export class Chip {
  /**
   * @param {App} app
   * @param {number} row
   */
  constructor(app, row) {
    this.app = app;
    this.shown = "";
    this.node = element(
      "button",
      {
        type: "button",
        class: "cb-chip",
        "data-request": app.run.id(row),
        onclick: () => app.select(app.selected === row ? -1 : row),
      },
      element("i", { "aria-hidden": "true" }),
      element("span", { dir: "auto", text: app.run.id(row) }),
    );
    this.update(row);
  }

  /** @param {number} row */
  update(row) {
    const { run, theme, selected } = this.app;
    const request = run.rows[row];
    const key = [theme.dark, selected === row, request?.code, row].join();
    if (this.shown === key) return;
    this.shown = key;
    this.node.style.setProperty("--own", theme.owners.css[row & 255]);
    this.node.setAttribute("aria-pressed", String(selected === row));
    this.node.title = request ? `${run.name(row)}: ${STATE_TEXT[STATES[request.code]]}` : run.id(row);
  }
}

/** Chips in a row, the first ones of many. */
export class ChipList {
  /**
   * @param {App} app
   * @param {number} most
   */
  constructor(app, most) {
    this.app = app;
    this.most = most;
    this.chips = element("div", { class: "cb-chips" });
    this.more = element("span", { class: "cb-more" });
    this.node = element("div", {}, this.chips, this.more);
  }

  /** @param {number[]} rows */
  show(rows) {
    const over = rows.length - this.most;
    sync(this.chips, rows.slice(0, this.most), {
      key: (row) => this.app.run.id(row),
      make: (row) => new Chip(this.app, row),
      update: (chip, row) => chip.update(row),
    });
    setText(this.more, over > 0 ? `and ${grouped(over)} more` : "");
  }
}
