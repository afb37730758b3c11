// Breakpoints and watches: what the run stops at, and what is worked out at each step.
// @ts-check
import { element, sync, setText } from "./dom.js";
import { Popover, errorLine, showError } from "./popover.js";

/** @import { App } from "./page/state.js" */
/** @import { Breakpoint, BreaksMessage, Said } from "./messages.js" */

const MAY_BE_ASKED =
  "Gauges (num_running, num_waiting, kv_usage, num_free_blocks, step_s, …), requests (r3.num_computed_tokens, r3.status), numbers, comparisons, and, or, not, min, max";

export class BreakMenu {
  /**
   * @param {App} app
   * @param {HTMLElement} root
   * @param {HTMLButtonElement} button
   * @param {HTMLElement} count of the breakpoints that are on, in the button
   */
  constructor(app, root, button, count) {
    this.app = app;
    this.count = count;
    this.popover = new Popover(app, root, button, "Breakpoints", "cb-breakpop", () => this.showTargets());
    this.events = "";
    /** The block that a breakpoint may be about; -1: none. */
    this.block = -1;
    this.event = element("select", { class: "cb-break-event", "aria-label": "Event" });
    this.target = element("select", { class: "cb-break-whose", "aria-label": "Of what" });
    this.usage = element("input", {
      type: "number",
      class: "cb-break-kv",
      min: 0,
      max: 99,
      value: 90,
      "aria-label": "Share of KV blocks in use, percent",
    });
    this.expression = element("input", {
      type: "text",
      class: "cb-break-when",
      maxlength: 200,
      placeholder: "num_waiting >= 3 and kv_usage > 0.8",
      "aria-label": "Expression",
      spellcheck: "false",
      title: MAY_BE_ASKED,
      onkeydown: (event) => {
        if (event.key !== "Enter") return;
        event.preventDefault();
        this.addExpression();
      },
    });
    this.error = errorLine("cb-break-error");
    this.list = element("div", { class: "cb-breaklist" });
    this.none = element("p", {
      class: "cb-note",
      text: "None yet. A run stops at the step in which one of them holds.",
    });
    this.watches = element("div", { class: "cb-breaklist" });
    this.back = element("button", {
      type: "button",
      class: "cb-btn cb-run-back",
      text: "◂ Back to last",
      title: "Back to the last step at which one held (Shift L)",
      onclick: () => this.run("run-back"),
    });
    this.on = element("button", {
      type: "button",
      class: "cb-btn cb-primary cb-run-on",
      text: "Run to next ▸",
      title: "On to the next step at which one holds, at full speed (Shift N)",
      onclick: () => this.run("run-on"),
    });
    this.fill();
  }

  fill() {
    const grow = () => element("span", { class: "cb-grow" });
    /** @param {...HTMLElement} parts */
    const line = (...parts) => element("div", { class: "cb-poprow" }, ...parts);
    this.popover.box.append(
      element("h2", { text: "Stop when" }),
      line(
        this.event,
        this.target,
        smallButton("cb-break-add", "Add", () => this.addEvent()),
      ),
      line(
        element("label", { class: "cb-inline" }, "KV above", this.usage, "%"),
        smallButton("cb-break-addkv", "Add", () => this.add({ kv_above: Number(this.usage.value) / 100 })),
      ),
      line(this.expression),
      line(
        grow(),
        smallButton("cb-break-addwhen", "Stop when it holds", () => this.addExpression()),
        smallButton("cb-watch-add", "Watch its value", () => this.watch()),
      ),
      this.error,
      this.none,
      this.list,
      this.watches,
      element("div", { class: "cb-poprow cb-popend" }, this.back, grow(), this.on),
    );
  }

  /** What an event may be about: the picked request, the block under the cursor. */
  showTargets() {
    const { app } = this;
    this.block = app.views?.blocks.cursor ?? -1;
    const choices = [["", "whoever it is"]];
    if (app.selected >= 0) choices.push(["r", app.run.id(app.selected)]);
    if (this.block > 0) choices.push(["b", `block ${this.block}`]);
    this.target.replaceChildren(...choices.map(([value, text]) => element("option", { value, text })));
    showError(this.error, "");
  }

  /** @param {Record<string, unknown>} wish */
  add(wish) {
    showError(this.error, "");
    this.app.send("break", wish);
  }

  addExpression() {
    this.add({ when: this.expression.value });
  }

  addEvent() {
    const event = this.event.value || null;
    const { app } = this;
    if (this.target.value === "r") this.add({ event, request: app.run.id(app.selected) });
    else if (this.target.value === "b") this.add({ event, block: this.block });
    else this.add({ event });
  }

  watch() {
    showError(this.error, "");
    this.app.send("watch", { expression: this.expression.value });
  }

  /** @param {"run-on" | "run-back"} command */
  run(command) {
    showError(this.error, "");
    this.app.send(command);
    if (!this.popover.open) return;
    this.popover.close(false);
    this.app.focus();
  }

  /** @param {BreaksMessage} message */
  show({ events, items, watches }) {
    if (this.events !== events.join()) {
      this.events = events.join();
      const choices = [...events.map((event) => [event, event]), ["", "anything"]];
      this.event.replaceChildren(...choices.map(([value, text]) => element("option", { value, text })));
    }
    const numOn = items.filter((item) => item.enabled).length;
    this.none.hidden = items.length > 0;
    this.back.disabled = !numOn;
    this.on.disabled = !numOn;
    setText(this.count, numOn ? String(numOn) : "");
    this.count.hidden = !numOn;
    sync(this.list, items, {
      key: (item) => item.name,
      make: (item) => new BreakRow(this.app, item),
      update: (row, item) => row.update(item),
    });
    sync(this.watches, watches, {
      key: (expression) => expression,
      make: (expression) => ({ node: watchRow(this.app, expression) }),
    });
  }

  /**
   * @param {Said} answer
   * @returns {boolean} false: nobody has seen it
   */
  said({ error }) {
    if (!error) {
      this.expression.value = "";
      showError(this.error, "");
      return true;
    }
    if (!this.popover.open) return false;
    showError(this.error, error);
    return true;
  }
}

class BreakRow {
  /**
   * @param {App} app
   * @param {Breakpoint} breakpoint
   */
  constructor(app, { name }) {
    this.box = element("input", {
      type: "checkbox",
      onchange: () => app.send("break-set", { name, enabled: this.box.checked }),
    });
    this.text = element("em");
    this.node = element(
      "div",
      { class: "cb-breakrow", "data-break": name },
      element(
        "label",
        { class: "cb-check" },
        this.box,
        element("span", { dir: "auto", text: name }),
        this.text,
      ),
      removeButton(`Remove ${name}`, () => app.send("break-remove", { name })),
    );
  }

  /** @param {Breakpoint} breakpoint */
  update({ enabled, error, hits }) {
    this.box.checked = enabled;
    setText(this.text, error || (hits ? `stopped ${hits}×` : ""));
    this.node.classList.toggle("cb-off", !enabled);
  }
}

/**
 * @param {App} app
 * @param {string} expression
 */
function watchRow(app, expression) {
  return element(
    "div",
    { class: "cb-breakrow", "data-watch": expression },
    element(
      "span",
      { class: "cb-check" },
      element("span", { class: "cb-dim", text: "watch" }),
      element("span", { dir: "auto", text: expression }),
    ),
    removeButton(`Stop watching ${expression}`, () => app.send("watch-remove", { name: expression })),
  );
}

/**
 * @param {string} className
 * @param {string} text
 * @param {() => void} onclick
 */
function smallButton(className, text, onclick) {
  return element("button", { type: "button", class: `cb-btn cb-small ${className}`, text, onclick });
}

/**
 * @param {string} label
 * @param {() => void} onclick
 */
function removeButton(label, onclick) {
  return element("button", {
    type: "button",
    class: "cb-tool",
    "aria-label": label,
    title: label,
    text: "×",
    onclick,
  });
}
