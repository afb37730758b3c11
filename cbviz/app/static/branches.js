// The list of branches: to show one, rename it, drop it.
// @ts-check
import { element, icon, ICON, sync, setText } from "./dom.js";
import { grouped, plural } from "./format.js";
import { Popover, errorLine, showError } from "./popover.js";

/** @import { App } from "./page/state.js" */
/** @import { Branch, Family, Said } from "./messages.js" */

export class BranchMenu {
  /**
   * @param {App} app
   * @param {HTMLElement} root
   * @param {HTMLButtonElement} button
   */
  constructor(app, root, button) {
    this.app = app;
    this.button = button;
    /** @type {Branch[]} */
    this.branches = [];
    this.label = element("span", { class: "cb-branchname" });
    const caret = element("span", { class: "cb-caret", "aria-hidden": "true", text: "▾" });
    button.append(icon(ICON.branch, 12), this.label, caret);
    this.popover = new Popover(app, root, button, "Branches", "cb-branchpop", () =>
      showError(this.error, ""),
    );
    this.list = element("div", { class: "cb-branchlist" });
    this.error = errorLine("cb-branch-error");
    this.popover.box.append(element("h2", { text: "Branches" }), this.list, this.error);
  }

  /** @param {Family} family */
  show({ name, branches }) {
    this.branches = branches;
    setText(this.label, name);
    this.button.title = `Branch ${name}: show another one, rename, drop`;
    this.button.setAttribute("aria-label", `Branch ${name}`);
    sync(this.list, branches, {
      key: (branch) => branch.name,
      make: (branch) => new BranchRow(this, branch),
      update: (row, branch) => row.update(branch),
    });
  }

  /**
   * Names of the branches with an engine that come of a branch, directly or not.
   * @param {string} name
   */
  below(name) {
    const all = [name];
    const live = this.branches.filter((branch) => branch.live);
    for (const parent of all) {
      for (const branch of live) {
        if (branch.parent === parent && !all.includes(branch.name)) all.push(branch.name);
      }
    }
    return all.slice(1).join(", ");
  }

  /**
   * @param {Said} answer
   * @returns {boolean} false: nobody has seen it
   */
  said({ error }) {
    showError(this.error, error);
    return !error || this.popover.open;
  }
}

class BranchRow {
  /**
   * @param {BranchMenu} menu
   * @param {Branch} branch
   */
  constructor(menu, branch) {
    const { name } = branch;
    this.menu = menu;
    this.branch = branch;
    this.name = element("button", {
      type: "button",
      class: "cb-branch-show",
      dir: "auto",
      title: "Show this branch",
      text: name,
      onclick: () => this.open(),
    });
    this.what = element("span", { class: "cb-note" });
    this.input = element("input", {
      type: "text",
      class: "cb-branch-new",
      dir: "auto",
      maxlength: 80,
      hidden: true,
      "aria-label": `New name of ${name}`,
      onkeydown: (event) => this.inputKey(event),
    });
    this.dropButton = element("button", {
      type: "button",
      class: "cb-btn cb-small cb-branch-drop",
      text: "Drop",
      "aria-label": `Drop ${name}`,
      onclick: () => this.drop(),
    });
    const rename = element("button", {
      type: "button",
      class: "cb-btn cb-small cb-branch-rename",
      text: "Rename",
      "aria-label": `Rename ${name}`,
      onclick: () => this.edit(!!this.input.hidden),
    });
    this.node = element(
      "div",
      { class: "cb-branchrow", "data-branch": name },
      element("div", {}, this.name, this.input, this.what),
      rename,
      this.dropButton,
    );
  }

  /** @param {Branch} branch */
  update(branch) {
    this.branch = branch;
    this.node.classList.toggle("cb-here", branch.shown);
    this.name.setAttribute("aria-current", String(branch.shown));
    setText(this.what, this.describe(branch));
    this.dropButton.hidden = branch.root;
    this.dropButton.textContent = "Drop";
  }

  /** @param {Branch} branch */
  describe({ parent, at, steps, live, done }) {
    const known = this.menu.branches.some(({ name }) => name === parent);
    const from = parent ? `from ${known ? parent : `${parent} (dropped)`} at step ${grouped(at)}, ` : "";
    const ended = done ? ", ended" : "";
    return from + plural(steps, "step") + (live ? ended : ", kept without an engine");
  }

  open() {
    const { app, popover } = this.menu;
    popover.close();
    if (!this.branch.shown) app.send("branch", { name: this.branch.name });
  }

  /** @param {KeyboardEvent} event */
  inputKey(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      this.menu.app.send("rename", { name: this.branch.name, new: this.input.value });
    } else if (event.key === "Escape") {
      event.stopPropagation();
      this.edit(false);
    }
  }

  /** @param {boolean} on */
  edit(on) {
    const { error, popover } = this.menu;
    this.input.hidden = !on;
    this.name.hidden = on;
    if (on) {
      this.input.value = this.branch.name;
      this.input.focus();
      this.input.select();
    } else if (popover.open) {
      this.name.focus();
    }
    showError(error, "");
  }

  /** The first click asks, the second one drops. */
  drop() {
    if (this.dropButton.textContent !== "Drop") {
      this.menu.app.send("drop", { name: this.branch.name });
      return;
    }
    const below = this.menu.below(this.branch.name);
    this.dropButton.textContent = below ? `Drop, with ${below}?` : "Really?";
  }
}
