// What the user sets: scenario, model, discipline, policy, knobs. Live knobs go out at once; the others wait for "Apply and restart".
// @ts-check
import { element, setText } from "./dom.js";

/** @import { App } from "./page/state.js" */
/** @import { Choice, ControlsMessage, Field } from "./messages.js" */

/** @typedef {string | number | boolean | null} Value */

/**
 * Whether two values are the same to the user: 8 and "8" are, null and "" too.
 * @param {Value} one
 * @param {Value} other
 */
const sameValue = (one, other) => String(one ?? "") === String(other ?? "");

export class Controls {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    /** @type {Map<string, Setting>} */
    this.settings = new Map();
    /** @type {Map<string, HTMLDetailsElement>} */
    this.groups = new Map();
    /** @type {Record<string, Value>} changes that wait for a restart */
    this.pending = {};
    this.list = element("div", { class: "cb-fields" });
    this.apply = element("button", {
      type: "button",
      class: "cb-apply",
      text: "Apply and restart",
      disabled: true,
      onclick: () => app.send("restart", { changes: this.pending }),
    });
    this.notes = element("ul", { class: "cb-notes" });
    this.lesson = element("button", {
      type: "button",
      class: "cb-lesson",
      text: "Back to the link's start",
      title: "The scenario and settings of this page's address, with no request of yours",
      hidden: true,
      onclick: () => {
        this.pending = {};
        app.send("lesson");
      },
    });
    host.append(this.list, this.apply, this.lesson, this.notes);
  }

  /** @param {ControlsMessage} message */
  show({ fields, notes = [], locked = false }) {
    const names = fields.map((field) => field.name);
    if (names.join() !== [...this.settings.keys()].join()) this.rebuild(fields);
    for (const field of fields) {
      const setting = this.settings.get(field.name);
      if (!setting) continue;
      setting.update(field, field.name in this.pending, locked);
      const reached = field.name in this.pending && sameValue(this.pending[field.name], field.value);
      if (!reached) continue;
      delete this.pending[field.name];
      setting.write(field.value);
    }
    this.notes.replaceChildren(...notes.map((text) => element("li", { text })));
    this.markPending();
  }

  /** @param {Field[]} fields */
  rebuild(fields) {
    this.settings.clear();
    this.groups.clear();
    this.list.replaceChildren();
    for (const field of fields) {
      const group = field.group ? this.groupOf(field.group) : null;
      const setting = new Setting(field, group, (changed) => this.changed(changed));
      this.settings.set(field.name, setting);
      (group ?? this.list).append(setting.node);
    }
  }

  /** @param {string} title */
  groupOf(title) {
    const known = this.groups.get(title);
    if (known) return known;
    const summary = element("summary", { text: title });
    const group = element("details", { class: "cb-group cb-fields" }, summary);
    this.groups.set(title, group);
    this.list.append(group);
    return group;
  }

  /** @param {Setting} setting */
  changed(setting) {
    const { name, label, live, value } = setting.field;
    setting.showError("");
    setting.explainChoice();
    if (!setting.valid) {
      setting.showError(`${label}: this is not a number`);
      return;
    }
    const chosen = setting.read();
    if (live) {
      this.app.send("set", { field: name, value: chosen });
      return;
    }
    if (sameValue(chosen, value)) delete this.pending[name];
    else this.pending[name] = chosen;
    this.markPending();
  }

  markPending() {
    for (const [name, { node }] of this.settings) node.classList.toggle("cb-pending", name in this.pending);
    const number = Object.keys(this.pending).length;
    this.apply.disabled = !number;
    setText(this.apply, number ? `Apply and restart (${number})` : "Apply and restart");
  }

  /**
   * Shows an error at its field, or takes it away.
   * @param {string} name
   * @param {string} text
   * @returns {boolean} false: there is no such field
   */
  showError(name, text) {
    const setting = this.settings.get(name);
    setting?.showError(text);
    return !!setting;
  }

  clearErrors() {
    for (const setting of this.settings.values()) setting.showError("");
  }
}

/** One field: its label, its input, what the choice costs, its error. */
class Setting {
  /**
   * @param {Field} field
   * @param {HTMLDetailsElement | null} group
   * @param {(setting: Setting) => void} changed
   */
  constructor(field, group, changed) {
    const id = "cb-f-" + field.name;
    this.field = field;
    this.group = group;
    this.changed = changed;
    /** Choices that the select has. */
    this.choices = "";
    /** @type {boolean | undefined} the field was at its usual value */
    this.plain = undefined;
    this.input = this.makeInput(id);
    this.error = element("p", { class: "cb-error", id: id + "-e", role: "alert", hidden: true });
    this.note = element("p", { class: "cb-note cb-choice", id: id + "-n", role: "status", hidden: true });
    this.input.setAttribute("aria-describedby", field.noted ? `${id}-e ${id}-n` : `${id}-e`);
    const title = field.help + (field.live ? "" : " Takes a restart.");
    this.node = element(
      "div",
      { class: field.kind === "select" ? "cb-field cb-wide" : "cb-field" },
      element("label", { for: id, title }, field.label),
      this.input,
      this.note,
      this.error,
    );
  }

  /** @param {string} id */
  makeInput(id) {
    const { kind, cls, min, max, placeholder } = this.field;
    const attributes = { id, class: cls || id, onchange: () => this.changed(this) };
    if (kind === "select") return element("select", attributes);
    if (kind === "bool") return element("input", { type: "checkbox", ...attributes });
    return element("input", {
      type: "number",
      inputmode: "numeric",
      min,
      max,
      step: kind === "float" ? "any" : 1,
      placeholder,
      ...attributes,
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        this.write(this.field.value);
        this.changed(this);
      },
    });
  }

  /**
   * @param {Field} field
   * @param {boolean} pending the user has chosen something else, which waits
   * @param {boolean} locked
   */
  update(field, pending, locked) {
    this.field = field;
    if (field.kind === "select") this.showChoices(field.options);
    if (!pending && document.activeElement !== this.input) this.write(field.value);
    this.input.disabled = locked;
    if (this.group && field.plain === false && this.plain !== false) this.group.open = true;
    this.plain = field.plain;
  }

  /** @param {Choice[]} options */
  showChoices(options) {
    const choices = options.map(([value, text]) => value + text).join("|");
    if (this.choices === choices) return;
    this.choices = choices;
    const chosen = this.input.value;
    this.input.replaceChildren(
      ...options.map(([value, text, help]) => element("option", { value, text, title: help })),
    );
    this.input.value = chosen;
  }

  /** @param {Value} value */
  write(value) {
    if (this.input instanceof HTMLInputElement && this.field.kind === "bool") this.input.checked = !!value;
    else this.input.value = String(value ?? "");
    if (this.field.kind === "select") this.input.title = this.helpOf(value) || this.field.help;
    this.explainChoice();
  }

  /** What a choice costs stands below it. */
  explainChoice() {
    const { noted, help } = this.field;
    if (!noted) return;
    const chosen = this.input.value;
    const known = this.field.options.some(([value]) => value === chosen);
    const text = noted.includes(chosen) ? this.helpOf(chosen) : "";
    setText(this.note, text);
    this.note.hidden = !text;
    if (known) this.input.title = this.helpOf(chosen) || help;
  }

  /** @param {Value} chosen */
  helpOf(chosen) {
    return this.field.options?.find(([value]) => value === chosen)?.[2] ?? "";
  }

  read() {
    const { kind } = this.field;
    if (this.input instanceof HTMLInputElement && kind === "bool") return this.input.checked;
    return kind === "select" ? this.input.value : this.input.value.trim();
  }

  /** False: what was typed is no number. */
  get valid() {
    return !this.input.validity.badInput;
  }

  /** @param {string} text empty: no error */
  showError(text) {
    if (text && this.group) this.group.open = true;
    setText(this.error, text);
    this.error.hidden = !text;
    this.input.setAttribute("aria-invalid", String(!!text));
  }
}
