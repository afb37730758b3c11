// A form that forks the run at the cursor, with something changed.
// @ts-check
import { element, setText } from "./dom.js";
import { grouped } from "./format.js";
import { Popover, errorLine, showError } from "./popover.js";

/** @import { App } from "./page/state.js" */
/** @import { ForkField, ForkFormMessage, Said } from "./messages.js" */

const ONLY_AT_START = "Only at step 0: it can't change in the middle of a run.";

export class ForkForm {
  /**
   * @param {App} app
   * @param {HTMLElement} root
   * @param {HTMLButtonElement} button
   */
  constructor(app, root, button) {
    this.app = app;
    /** The step to fork at, and the request that may be left out there. */
    this.at = 0;
    this.who = "";
    /** @type {ForkInput[]} */
    this.inputs = [];
    this.popover = new Popover(app, root, button, "Fork", "cb-forkpop", () => {
      showError(this.error, "");
      this.readPage();
      app.send("forkform");
    });
    this.title = element("h2");
    this.note = element("p", { class: "cb-note" });
    this.fields = element("div", { class: "cb-fields" });
    this.error = errorLine("cb-fork-error");
    this.name = element("input", {
      type: "text",
      class: "cb-fork-name",
      maxlength: 80,
      placeholder: "as what is changed",
      dir: "auto",
      "aria-label": "Name of the branch",
    });
    this.add = element("input", { type: "checkbox", class: "cb-fork-add" });
    this.addText = element("span");
    this.remove = element("input", { type: "checkbox", class: "cb-fork-remove" });
    this.removeText = element("span");
    const create = element("button", {
      type: "button",
      class: "cb-btn cb-primary cb-fork-create",
      text: "Create",
      onclick: () => this.create(),
    });
    const { box } = this.popover;
    box.append(
      this.title,
      this.note,
      this.fields,
      element("label", { class: "cb-check" }, this.add, this.addText),
      element("label", { class: "cb-check" }, this.remove, this.removeText),
      element("div", { class: "cb-field" }, element("label", { text: "name" }), this.name),
      this.error,
      element("div", { class: "cb-poprow" }, create),
    );
    box.addEventListener("keydown", (event) => {
      const target = /** @type {Element} */ (event.target);
      if (event.key !== "Enter" || !target.matches("input, select")) return;
      event.preventDefault();
      this.create();
    });
  }

  /** What the page offers for the branch: the prompt in the box, the picked request. */
  readPage() {
    const { app } = this;
    const prompt = app.promptText().trim();
    const picked = app.selected >= 0;
    const request = picked ? app.run.rows[app.selected] : null;
    const ended = request?.status === "finished" || request?.status === "refused";
    this.who = picked ? app.run.id(app.selected) : "";
    this.add.disabled = !prompt;
    this.add.checked = false;
    setText(this.addText, prompt ? "add the prompt in the box" : "add a prompt: type it in the box first");
    this.remove.checked = false;
    this.remove.disabled = !picked || ended;
    const why = ended ? ": it has ended" : "";
    setText(this.removeText, picked ? `remove ${this.who}${why}` : "remove a request: pick it first");
  }

  /** @param {ForkFormMessage} message */
  show({ at, name, fields }) {
    this.at = at;
    setText(this.title, `Fork at step ${grouped(at)}`);
    setText(
      this.note,
      `A branch with something changed from here on; “${name}” stays as it is. With nothing changed it repeats it.`,
    );
    this.inputs = fields.map((field) => new ForkInput(field));
    this.fields.replaceChildren(...this.inputs.map((input) => input.node));
    this.name.value = "";
    if (!this.popover.open) return;
    this.popover.place();
    this.inputs.find(({ input }) => !input.disabled)?.input.focus({ preventScroll: true });
  }

  create() {
    if (!this.inputs.length) return;
    showError(this.error, "");
    const { app } = this;
    const changed = this.inputs.filter((input) => input.changed);
    app.send("fork", {
      at: this.at,
      changes: Object.fromEntries(changed.map((input) => [input.field.name, input.value])),
      name: this.name.value,
      ...(this.add.checked ? { prompt: app.promptText(), ...app.promptAsked() } : {}),
      remove: this.remove.checked ? this.who : null,
    });
  }

  /** @param {Said} answer */
  said({ error, name }) {
    if (error) {
      showError(this.error, error);
      this.popover.place();
      return;
    }
    this.popover.close();
    this.app.say(`Branch ${name} is shown`);
  }
}

class ForkInput {
  /** @param {ForkField} field */
  constructor(field) {
    this.field = field;
    const id = "cb-fork-" + field.name;
    const title = field.open ? field.help : `${field.help} ${ONLY_AT_START}`;
    const attributes = { id, class: id, disabled: !field.open, title };
    this.input =
      field.kind === "select"
        ? element(
            "select",
            attributes,
            ...field.options.map(([value, text, help]) => element("option", { value, text, title: help })),
          )
        : element("input", {
            type: "number",
            inputmode: "numeric",
            min: field.min,
            max: field.max,
            ...attributes,
          });
    this.input.value = String(field.value ?? "");
    const label = element("label", { for: id, text: field.label, title });
    this.node = element("div", { class: "cb-field" }, label, this.input);
    this.input.addEventListener("change", () => this.node.classList.toggle("cb-pending", this.changed));
  }

  get value() {
    return this.input.value.trim();
  }

  get changed() {
    return !this.input.disabled && this.value !== String(this.field.value ?? "");
  }
}
