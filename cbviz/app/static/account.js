// Where the tokens of the step and the slots of the pool are: two bars with exact figures; over the run, beside what contiguous memory would have held.
// @ts-check
import { element, setText } from "./dom.js";
import { grouped, percent } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Account, NoAccount, Parts, Reservation } from "./messages.js" */

/** @type {Record<string, string>} words for parts, where they are not their own names */
const PART_TEXT = {
  partly_empty: "partly empty",
  internal: "never filled",
  external: "in no piece",
  fragmented: "free, in too short runs",
};
/** @type {Record<string, string>} */
const SCHEME_TEXT = {
  max_model_len: "max_model_len each",
  exact: "prompt + max_tokens",
  buddy: "power of two (buddy)",
  paged: "this run's blocks",
};
/** @type {Record<string, string>} parts that have the colour of another */
const COLOR_OF = { internal: "partly_empty", external: "padded" };

/** @param {string} part */
const partText = (part) => PART_TEXT[part] || part;
/** @param {string} part */
const partClass = (part) => "cb-acc-" + (COLOR_OF[part] || part);

/**
 * @param {Parts} parts
 * @param {number} total
 */
function partsBar(parts, total) {
  const label = parts.map(([part, amount]) => `${partText(part)} ${amount}`).join(", ");
  const boxes = parts
    .filter(([, amount]) => amount > 0)
    .map(([part, amount]) =>
      element("i", { class: partClass(part), style: `flex-grow:${amount / (total || 1)}` }),
    );
  return element("div", { class: "cb-bar", role: "img", "aria-label": label }, ...boxes);
}

/**
 * @param {Parts} parts
 * @param {(amount: number) => string} write
 * @param {Node | null} first stands before them
 */
function partsFigures(parts, write, first = null) {
  const figures = parts.map(([part, amount]) =>
    element(
      "span",
      { "data-part": part, class: amount ? "" : "cb-dim" },
      element("i", { class: partClass(part), "aria-hidden": "true" }),
      element("b", { text: write(amount) }),
      " " + partText(part),
    ),
  );
  return element("div", { class: "cb-accfigures" }, first, ...figures);
}

/**
 * A bar and its figures.
 * @param {string} name
 * @param {string} title
 * @param {Parts} parts the first one is the total
 */
function accountBlock(name, title, [[, total], ...parts]) {
  const sum = element("span", { "data-part": "total" }, element("b", { text: grouped(total) }), " " + title);
  return element(
    "div",
    { class: "cb-acc", "data-account": name },
    partsBar(parts, total),
    partsFigures(parts, grouped, sum),
  );
}

/**
 * Shares of the pool, scheme by scheme; or why that can't be said.
 * @param {Reservation} reservation
 */
function reservationBlocks({ rows, missing, steps, parts, assumptions }) {
  if (!rows) return [element("p", { class: "cb-note", text: missing })];
  const title = element("p", {
    class: "cb-sub",
    text: `Share of the pool, mean of ${grouped(steps)} recorded steps, beside contiguous memory:`,
    title: assumptions.join("\n"),
  });
  const schemes = rows.map(([scheme, help, shares, placed]) => {
    const room = placed === null || scheme === "paged" ? "" : `${percent(placed)} had room`;
    const shown = /** @type {Parts} */ (parts.map((part, i) => [part, shares[i]])).filter(
      ([part, share]) => share > 0 || part === "used",
    );
    const head = element(
      "div",
      { class: "cb-acchead" },
      element("span", { text: SCHEME_TEXT[scheme] || scheme }),
      element("b", { text: room }),
    );
    return element(
      "div",
      { class: "cb-acc", "data-scheme": scheme, title: help },
      head,
      partsBar(shown, 1),
      partsFigures(shown, percent),
    );
  });
  return [title, ...schemes];
}

export class AccountPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.none = element("p", {
      class: "cb-empty",
      text: "The accounts of a step appear with the first one.",
    });
    this.ofStep = element("div");
    this.ofRun = element("div");
    host.append(this.none, this.ofStep, this.ofRun);
    /** @type {Account | NoAccount | null} */
    this.shown = null;
  }

  draw() {
    const { account, run } = this.app;
    if (!account || !run.step) {
      this.shown = null;
      this.clear();
      return;
    }
    if (account === this.shown) {
      this.none.hidden = !account.missing;
      return;
    }
    this.shown = account;
    if (account.missing !== undefined) {
      setText(this.none, account.missing);
      this.clear();
      return;
    }
    this.none.hidden = true;
    this.ofStep.replaceChildren(
      accountBlock("tokens", "tokens:", account.tokens),
      accountBlock("slots", "slots:", account.slots),
    );
    if (account.run) {
      const { steps, tokens, slots } = account.run;
      this.ofRun.replaceChildren(
        accountBlock("run-tokens", `tokens in steps 1–${grouped(steps)}:`, tokens),
        accountBlock("run-slots", "slots × steps:", slots),
        ...(account.reservation ? reservationBlocks(account.reservation) : []),
      );
    }
  }

  clear() {
    this.none.hidden = false;
    this.ofStep.replaceChildren();
    this.ofRun.replaceChildren();
  }
}
