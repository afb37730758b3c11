// Branches: a form that forks the run at the cursor, and the list of branches to show, rename and drop.
import { h, icon, ICON, sync, setText } from "./dom.js";
import { nf, plural } from "./format.js";
import { Popover, errorLine, fail } from "./popover.js";

export class ForkForm {
  constructor(app, root, button) {
    this.app = app;
    this.pop = new Popover(app, root, button, "Fork", "cb-forkpop", () => {
      fail(this.error, "");
      this.picked();
      app.send("forkform");
    });
    this.title = h("h2");
    this.note = h("p", { class: "cb-note" });
    this.fields = h("div", { class: "cb-fields" });
    this.error = errorLine("cb-fork-error");
    this.name = h("input", {
      type: "text",
      class: "cb-fork-name",
      maxlength: 80,
      placeholder: "as what is changed",
      dir: "auto",
      "aria-label": "Name of the branch",
    });
    this.add = h("input", { type: "checkbox", class: "cb-fork-add" });
    this.addText = h("span");
    this.remove = h("input", { type: "checkbox", class: "cb-fork-remove" });
    this.removeText = h("span");
    this.create = h("button", {
      type: "button",
      class: "cb-btn cb-primary cb-fork-create",
      text: "Create",
      onclick: () => this.go(),
    });
    this.pop.box.append(
      this.title,
      this.note,
      this.fields,
      h("label", { class: "cb-check" }, this.add, this.addText),
      h("label", { class: "cb-check" }, this.remove, this.removeText),
      h("div", { class: "cb-field" }, h("label", { text: "name" }), this.name),
      this.error,
      h("div", { class: "cb-poprow" }, this.create),
    );
    this.pop.box.addEventListener("keydown", (e) => {
      if (e.key === "Enter" && e.target.matches("input, select")) {
        e.preventDefault();
        this.go();
      }
    });
  }
  picked() {
    const { app } = this;
    const text = app.promptText().trim();
    const who = app.sel >= 0 ? app.R.id(app.sel) : "";
    const q = app.sel >= 0 ? app.R.rows[app.sel] : null;
    const ended = q && (q.status === "finished" || q.status === "refused");
    this.add.disabled = !text;
    this.add.checked = false;
    setText(this.addText, text ? "add the prompt in the box" : "add a prompt: type it in the box first");
    this.remove.checked = false;
    this.remove.disabled = !who || ended;
    setText(
      this.removeText,
      !who ? "remove a request: pick it first" : ended ? `remove ${who}: it has ended` : `remove ${who}`,
    );
    this.who = who;
  }
  show(m) {
    // m: { at, name, fields: [{ name, label, kind, value, options, open, help }] }
    this.at = m.at;
    setText(this.title, `Fork at step ${nf.format(m.at)}`);
    setText(
      this.note,
      `A branch with something changed from here on; “${m.name}” stays as it is. With nothing changed it repeats it.`,
    );
    this.inputs = m.fields.map((f) => {
      const id = "cb-fork-" + f.name;
      const attrs = {
        id,
        class: "cb-fork-" + f.name,
        disabled: !f.open,
        title: f.open ? f.help : f.help + " Only at step 0: it can't change in the middle of a run.",
      };
      const input =
        f.kind === "select"
          ? h(
              "select",
              attrs,
              ...f.options.map(([value, text, help]) => h("option", { value, text, title: help })),
            )
          : h("input", { type: "number", inputmode: "numeric", min: f.min, max: f.max, ...attrs });
      input.value = f.value ?? "";
      const label = h("label", { for: id, text: f.label, title: attrs.title });
      const row = h("div", { class: "cb-field" }, label, input);
      input.addEventListener("change", () =>
        row.classList.toggle("cb-pending", String(f.value ?? "") !== input.value),
      );
      return { f, input, row };
    });
    this.fields.replaceChildren(...this.inputs.map((x) => x.row));
    this.name.value = "";
    if (this.pop.open) {
      this.pop.place();
      this.inputs.find((x) => !x.input.disabled)?.input.focus({ preventScroll: true });
    }
  }
  go() {
    if (!this.inputs) return;
    fail(this.error, "");
    const changes = {};
    for (const { f, input } of this.inputs) {
      if (!input.disabled && input.value.trim() !== String(f.value ?? "")) {
        changes[f.name] = input.value.trim();
      }
    }
    this.app.send("fork", {
      at: this.at,
      changes,
      name: this.name.value,
      ...(this.add.checked ? { prompt: this.app.promptText(), ...this.app.promptAsked() } : {}),
      remove: this.remove.checked ? this.who : null,
    });
  }
  said(m) {
    if (m.error) {
      fail(this.error, m.error);
      this.pop.place();
    } else {
      this.pop.close();
      this.app.say(`Branch ${m.name} is shown`);
    }
  }
}

export class BranchMenu {
  constructor(app, root, button) {
    this.app = app;
    this.button = button;
    this.label = h("span", { class: "cb-branchname" });
    button.append(
      icon(ICON.branch, 12),
      this.label,
      h("span", { class: "cb-caret", "aria-hidden": "true", text: "▾" }),
    );
    this.pop = new Popover(app, root, button, "Branches", "cb-branchpop", () => fail(this.error, ""));
    this.list = h("div", { class: "cb-branchlist" });
    this.error = errorLine("cb-branch-error");
    this.pop.box.append(h("h2", { text: "Branches" }), this.list, this.error);
  }
  show(m) {
    // m: { name, branches: [{ name, parent, at, steps, shown, live, done, root }] }
    this.branches = m.branches;
    setText(this.label, m.name);
    this.button.title = `Branch ${m.name}: show another one, rename, drop`;
    this.button.setAttribute("aria-label", `Branch ${m.name}`);
    const parents = m.branches.map((b) => b.name);
    sync(
      this.list,
      m.branches,
      (b) => b.name,
      (b) => this.row(b),
      (n, b) => {
        n._b = b;
        n.classList.toggle("cb-here", b.shown);
        n._name.setAttribute("aria-current", String(b.shown));
        setText(
          n._what,
          (b.parent
            ? `from ${parents.includes(b.parent) ? b.parent : b.parent + " (dropped)"} at step ${nf.format(b.at)}, `
            : "") +
            plural(b.steps, "step") +
            (b.live ? (b.done ? ", ended" : "") : ", kept without an engine"),
        );
        n._drop.hidden = b.root;
        n._drop.textContent = "Drop";
      },
    );
  }
  row(b) {
    const name = h(
      "button",
      {
        type: "button",
        class: "cb-branch-show",
        dir: "auto",
        title: "Show this branch",
        onclick: () => {
          this.pop.close();
          if (!n._b.shown) this.app.send("branch", { name: n._b.name });
        },
      },
      b.name,
    );
    const what = h("span", { class: "cb-note" });
    const input = h("input", {
      type: "text",
      class: "cb-branch-new",
      dir: "auto",
      maxlength: 80,
      hidden: true,
      "aria-label": `New name of ${b.name}`,
      onkeydown: (e) => {
        if (e.key === "Enter") {
          e.preventDefault();
          this.app.send("rename", { name: n._b.name, new: input.value });
        } else if (e.key === "Escape") {
          e.stopPropagation();
          edit(false);
        }
      },
    });
    const edit = (on) => {
      input.hidden = !on;
      name.hidden = on;
      if (on) {
        input.value = n._b.name;
        input.focus();
        input.select();
      } else if (this.pop.open) {
        name.focus();
      }
      fail(this.error, "");
    };
    const drop = h("button", {
      type: "button",
      class: "cb-btn cb-small cb-branch-drop",
      text: "Drop",
      "aria-label": `Drop ${b.name}`,
      onclick: () => {
        if (drop.textContent === "Drop") {
          const below = this.below(n._b.name);
          drop.textContent = below ? `Drop, with ${below}?` : "Really?";
        } else {
          this.app.send("drop", { name: n._b.name });
        }
      },
    });
    const n = h(
      "div",
      { class: "cb-branchrow", "data-branch": b.name },
      h("div", {}, name, input, what),
      h("button", {
        type: "button",
        class: "cb-btn cb-small cb-branch-rename",
        text: "Rename",
        "aria-label": `Rename ${b.name}`,
        onclick: () => edit(input.hidden),
      }),
      drop,
    );
    Object.assign(n, { _name: name, _what: what, _drop: drop, _b: b });
    return n;
  }
  below(name) {
    const all = [name];
    const live = this.branches.filter((b) => b.live);
    for (let i = 0; i < all.length; i++) {
      for (const b of live) if (b.parent === all[i] && !all.includes(b.name)) all.push(b.name);
    }
    return all.slice(1).join(", ");
  }
  said(m) {
    fail(this.error, m.error);
    if (m.error && !this.pop.open) return false;
    return true;
  }
}
