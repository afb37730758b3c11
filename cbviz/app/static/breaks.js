// Breakpoints and watches: what the run stops at, and what is worked out at each step.
import { h, sync, setText } from "./dom.js";
import { Popover, errorLine, fail } from "./popover.js";
export class BreakMenu {
  constructor(app, root, button) {
    this.app = app;
    this.button = button;
    this.pop = new Popover(app, root, button, "Breakpoints", "cb-breakpop", () => this.picked());
    const add = (cls, text, f) =>
      h("button", { type: "button", class: `cb-btn cb-small ${cls}`, text, onclick: f });
    const send = (wish) => {
      fail(this.error, "");
      app.send("break", wish);
    };
    this.event = h("select", { class: "cb-break-event", "aria-label": "Event" });
    this.whose = h("select", { class: "cb-break-whose", "aria-label": "Of what" });
    this.kv = h("input", {
      type: "number",
      class: "cb-break-kv",
      min: 0,
      max: 99,
      value: 90,
      "aria-label": "Share of KV blocks in use, percent",
    });
    this.when = h("input", {
      type: "text",
      class: "cb-break-when",
      maxlength: 200,
      placeholder: "num_waiting >= 3 and kv_usage > 0.8",
      "aria-label": "Expression",
      spellcheck: "false",
      title:
        "Gauges (num_running, num_waiting, kv_usage, num_free_blocks, step_s, …), requests (r3.num_computed_tokens, r3.status), numbers, comparisons, and, or, not, min, max",
    });
    this.error = errorLine("cb-break-error");
    this.list = h("div", { class: "cb-breaklist" });
    this.none = h("p", {
      class: "cb-note",
      text: "None yet. A run stops at the step in which one of them holds.",
    });
    this.watches = h("div", { class: "cb-breaklist" });
    this.back = h("button", {
      type: "button",
      class: "cb-btn cb-run-back",
      text: "◂ Back to last",
      title: "Back to the last step at which one held (Shift L)",
      onclick: () => this.run("run-back"),
    });
    this.on = h("button", {
      type: "button",
      class: "cb-btn cb-primary cb-run-on",
      text: "Run to next ▸",
      title: "On to the next step at which one holds, at full speed (Shift N)",
      onclick: () => this.run("run-on"),
    });
    this.pop.box.append(
      h("h2", { text: "Stop when" }),
      h(
        "div",
        { class: "cb-poprow" },
        this.event,
        this.whose,
        add("cb-break-add", "Add", () => send({ event: this.event.value || null, ...this.target() })),
      ),
      h(
        "div",
        { class: "cb-poprow" },
        h("label", { class: "cb-inline" }, "KV above", this.kv, "%"),
        add("cb-break-addkv", "Add", () => send({ kv_above: Number(this.kv.value) / 100 })),
      ),
      h("div", { class: "cb-poprow" }, this.when),
      h(
        "div",
        { class: "cb-poprow" },
        h("span", { class: "cb-grow" }),
        add("cb-break-addwhen", "Stop when it holds", () => send({ when: this.when.value })),
        add("cb-watch-add", "Watch its value", () => {
          fail(this.error, "");
          app.send("watch", { expression: this.when.value });
        }),
      ),
      this.error,
      this.none,
      this.list,
      this.watches,
      h("div", { class: "cb-poprow cb-popend" }, this.back, h("span", { class: "cb-grow" }), this.on),
    );
    this.when.addEventListener("keydown", (e) => {
      if (e.key === "Enter") {
        e.preventDefault();
        send({ when: this.when.value });
      }
    });
  }
  picked() {
    const { app } = this;
    const b = app.bv ? app.bv.cur : -1;
    const opts = [["", "whoever it is"]];
    if (app.sel >= 0) opts.push(["r", app.R.id(app.sel)]);
    if (b > 0) opts.push(["b", `block ${b}`]);
    this.block = b;
    this.whose.replaceChildren(...opts.map(([value, text]) => h("option", { value, text })));
    fail(this.error, "");
  }
  target() {
    return this.whose.value === "r"
      ? { request: this.app.R.id(this.app.sel) }
      : this.whose.value === "b"
        ? { block: this.block }
        : {};
  }
  run(cmd) {
    fail(this.error, "");
    this.app.send(cmd);
    if (this.pop.open) {
      this.pop.close(false);
      this.app.focus();
    }
  }
  show(m) {
    // m: { events, items: [{ name, enabled, hits, error }], watches }
    if (this.events !== m.events.join()) {
      this.events = m.events.join();
      this.event.replaceChildren(
        ...m.events.map((v) => h("option", { value: v, text: v })),
        h("option", { value: "", text: "anything" }),
      );
    }
    this.names = m.items.map((b) => b.name);
    this.none.hidden = m.items.length > 0;
    const on = m.items.filter((b) => b.enabled).length;
    this.back.disabled = this.on.disabled = !on;
    setText(this.button._count, on ? String(on) : "");
    this.button._count.hidden = !on;
    sync(
      this.list,
      m.items,
      (b) => b.name,
      (b) => {
        const box = h("input", {
          type: "checkbox",
          onchange: () => this.app.send("break-set", { name: b.name, enabled: box.checked }),
        });
        const n = h(
          "div",
          { class: "cb-breakrow", "data-break": b.name },
          h("label", { class: "cb-check" }, box, h("span", { dir: "auto", text: b.name }), h("em")),
          this.cross(`Remove ${b.name}`, () => this.app.send("break-remove", { name: b.name })),
        );
        n._box = box;
        return n;
      },
      (n, b) => {
        n._box.checked = b.enabled;
        setText(n.querySelector("em"), b.error ? b.error : b.hits ? `stopped ${b.hits}×` : "");
        n.classList.toggle("cb-off", !b.enabled);
      },
    );
    sync(
      this.watches,
      m.watches,
      (w) => w,
      (w) =>
        h(
          "div",
          { class: "cb-breakrow", "data-watch": w },
          h(
            "span",
            { class: "cb-check" },
            h("span", { class: "cb-dim", text: "watch" }),
            h("span", { dir: "auto", text: w }),
          ),
          this.cross(`Stop watching ${w}`, () => this.app.send("watch-remove", { name: w })),
        ),
    );
  }
  cross(label, f) {
    return h("button", {
      type: "button",
      class: "cb-tool",
      "aria-label": label,
      title: label,
      text: "×",
      onclick: f,
    });
  }
  said(m) {
    if (!m.error) {
      this.when.value = "";
      fail(this.error, "");
      return true;
    }
    if (!this.pop.open) return false;
    fail(this.error, m.error);
    return true;
  }
}
