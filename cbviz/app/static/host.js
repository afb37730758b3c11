// The host's blocks under the block map: who waits there, with how many blocks. Hidden where nobody can be swapped out and nobody is.
// @ts-check
import { element } from "./dom.js";
import { plural } from "./format.js";

/** @import { App } from "./page/state.js" */

const HOST_CELLS = 24;
const WHAT_IT_IS =
  "Host memory: a preempted request's blocks wait here and are copied back, instead of being computed again";

export class HostStrip {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.shown = "";
  }

  draw() {
    const { run, theme } = this.app;
    const total = run.config.swap_blocks || 0;
    const away = run.waiting
      .map((row) => ({ row, blocks: run.rows[row]?.host ?? 0 }))
      .filter(({ blocks }) => blocks);
    const key = [total, theme.dark, ...away.map(({ row, blocks }) => `${row}x${blocks}`)].join();
    if (key === this.shown) return;
    this.shown = key;
    const used = away.reduce((sum, { blocks }) => sum + blocks, 0);
    this.host.hidden = !total && !used;
    if (this.host.hidden) return;
    const head = element(
      "span",
      { class: "cb-hosthead", title: WHAT_IT_IS },
      element("b", { text: "Host" }),
      ` ${used} of ${plural(total || used, "block")}`,
    );
    this.host.replaceChildren(head, ...away.map(({ row, blocks }) => this.button(row, blocks)));
  }

  /**
   * @param {number} row
   * @param {number} blocks
   */
  button(row, blocks) {
    const { run } = this.app;
    const cells = Array.from({ length: Math.min(blocks, HOST_CELLS) }, () => this.cell(row));
    const computed = plural(run.rows[row]?.computed ?? 0, "token");
    const on = plural(blocks, "block");
    const title =
      `${run.name(row)} is swapped out: ${on} on the host, ${computed} that need no computing. ` +
      `It comes back when ${on} are free at once.`;
    return element(
      "button",
      { type: "button", class: "cb-hostreq", title, onclick: () => this.app.select(row) },
      element("b", { dir: "auto", text: run.id(row) }),
      ...cells,
      blocks > HOST_CELLS ? ` … ${blocks}` : ` ${blocks}`,
    );
  }

  /** @param {number} row */
  cell(row) {
    const { bg, owners } = this.app.theme;
    const stripes = `repeating-linear-gradient(0deg, transparent 0 2px, ${bg} 2px 3px)`;
    const style = `background: ${stripes}, ${owners.css[row & 255]}`;
    return element("i", { class: "cb-hostcell", "aria-hidden": "true", style });
  }
}
