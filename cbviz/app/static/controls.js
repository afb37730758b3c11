// What the user sets: scenario, model, discipline, policy, knobs, and prompts. Live knobs go out at once; the others wait for "Apply and restart".
import { h, setText } from "./dom.js";
export class Controls {
  constructor(host, app) {
    this.app = app;
    this.fields = new Map();
    this.pending = {};
    this.list = h("div", { class: "cb-fields" });
    this.apply = h("button", {
      type: "button",
      class: "cb-apply",
      text: "Apply and restart",
      disabled: true,
      onclick: () => app.send("restart", { changes: this.pending }),
    });
    this.notes = h("ul", { class: "cb-notes" });
    this.lesson = h("button", {
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
  // m.fields: [{ name, label, kind: select|int|float|bool, value, options: [[value, text, help]], noted: [values whose help is shown], help, unit, min, max, placeholder, live, cls, group, plain }]
  show(m) {
    if (this.names !== m.fields.map((f) => f.name).join()) {
      this.names = m.fields.map((f) => f.name).join();
      this.fields.clear();
      this.groups = new Map();
      this.list.replaceChildren();
      for (const f of m.fields) this.build(f);
    }
    for (const f of m.fields) {
      const x = this.fields.get(f.name);
      x.f = f;
      if (f.kind === "select") this.options(x, f.options);
      if (!(f.name in this.pending) && document.activeElement !== x.input) this.write(x, f.value);
      if (f.name in this.pending && this.same(this.pending[f.name], f.value)) {
        delete this.pending[f.name];
        this.write(x, f.value);
      }
      x.input.disabled = !!m.locked;
      if (f.group && f.plain === false && x.plain !== false) x.group.open = true;
      x.plain = f.plain;
    }
    this.notes.replaceChildren(...(m.notes || []).map((t) => h("li", { text: t })));
    this.mark();
  }
  same(a, b) {
    return String(a ?? "") === String(b ?? "");
  }
  build(f) {
    const id = "cb-f-" + f.name;
    const cls = f.cls || "cb-f-" + f.name;
    const x = { f };
    const change = () => this.changed(x);
    x.input =
      f.kind === "select"
        ? h("select", { id, class: cls, onchange: change })
        : f.kind === "bool"
          ? h("input", { type: "checkbox", id, class: cls, onchange: change })
          : h("input", {
              type: "number",
              id,
              class: cls,
              inputmode: "numeric",
              min: f.min,
              max: f.max,
              step: f.kind === "float" ? "any" : 1,
              placeholder: f.placeholder,
              onchange: change,
              onkeydown: (e) => {
                if (e.key === "Escape") {
                  this.write(x, x.f.value);
                  this.changed(x);
                }
              },
            });
    x.error = h("p", { class: "cb-error", id: id + "-e", role: "alert", hidden: true });
    x.input.setAttribute("aria-describedby", id + "-e");
    x.note = h("p", { class: "cb-note cb-choice", id: id + "-n", role: "status", hidden: true });
    if (f.noted) x.input.setAttribute("aria-describedby", `${id}-e ${id}-n`);
    x.label = h("label", { for: id, title: f.help + (f.live ? "" : " Takes a restart.") }, f.label);
    x.row = h(
      "div",
      { class: "cb-field" + (f.kind === "select" ? " cb-wide" : "") },
      x.label,
      x.input,
      x.note,
      x.error,
    );
    this.fields.set(f.name, x);
    if (f.group) x.group = this.group(f.group);
    (x.group || this.list).append(x.row);
  }
  group(title) {
    let g = this.groups.get(title);
    if (!g) {
      g = h("details", { class: "cb-group cb-fields" }, h("summary", { text: title }));
      this.groups.set(title, g);
      this.list.append(g);
    }
    return g;
  }
  options(x, list) {
    const key = list.map((o) => o[0] + o[1]).join("|");
    if (x.key === key) return;
    x.key = key;
    const v = x.input.value;
    x.input.replaceChildren(...list.map(([value, text, help]) => h("option", { value, text, title: help })));
    x.input.value = v;
  }
  write(x, v) {
    if (x.f.kind === "bool") x.input.checked = !!v;
    else x.input.value = v ?? "";
    if (x.f.kind === "select") {
      const o = (x.f.options || []).find((p) => p[0] === v);
      x.input.title = o && o[2] ? o[2] : x.f.help;
    }
    this.tell(x);
  }
  tell(x) {
    if (!x.f.noted) return;
    const v = x.input.value;
    const o = x.f.options.find((p) => p[0] === v);
    const t = x.f.noted.includes(v) && o ? o[2] : "";
    setText(x.note, t);
    x.note.hidden = !t;
    if (o) x.input.title = o[2] || x.f.help;
  } // what a choice costs stands below it
  read(x) {
    return x.f.kind === "bool"
      ? x.input.checked
      : x.f.kind === "select"
        ? x.input.value
        : x.input.value.trim();
  }
  changed(x) {
    const v = this.read(x);
    const { name, live, value } = x.f;
    this.fail(name, "");
    this.tell(x);
    if (x.f.kind !== "bool" && x.f.kind !== "select" && x.input.validity.badInput) {
      return this.fail(name, `${x.f.label}: this is not a number`);
    }
    if (live) {
      this.app.send("set", { field: name, value: v });
    } else {
      if (this.same(v, value)) delete this.pending[name];
      else this.pending[name] = v;
      this.mark();
    }
  }
  mark() {
    for (const [n, x] of this.fields) x.row.classList.toggle("cb-pending", n in this.pending);
    const k = Object.keys(this.pending).length;
    this.apply.disabled = !k;
    setText(this.apply, k ? `Apply and restart (${k})` : "Apply and restart");
  }
  fail(field, text) {
    const x = this.fields.get(field);
    if (!x) return false;
    if (text && x.group) x.group.open = true;
    setText(x.error, text);
    x.error.hidden = !text;
    x.input.setAttribute("aria-invalid", String(!!text));
    return true;
  }
  clear() {
    for (const n of this.fields.keys()) this.fail(n, "");
  }
}
const BEAMS =
  "Beam search: this many of the most probable sequences go on side by side and share blocks; the best comes first in the end. Needs a real model.";
const ANSWERS =
  "Sequences from this one prompt (n): it is computed once, its blocks are shared, and each answer needs a seat. Several are drawn at temperature 0.8, so that they differ; one alone is greedy.";
export class PromptBox {
  constructor(host, app) {
    this.app = app;
    this.text = h("textarea", {
      class: "cb-prompt",
      dir: "auto",
      rows: 2,
      placeholder: "Type a prompt; it joins the next step",
      "aria-label": "Prompt",
      "aria-describedby": "cb-prompt-e",
      maxlength: 200000,
      onkeydown: (e) => {
        if (e.key === "Enter" && !e.shiftKey) {
          e.preventDefault();
          this.add();
        }
      },
    });
    this.max = h("input", {
      type: "number",
      class: "cb-maxtokens",
      min: 1,
      value: 64,
      "aria-label": "Most new tokens",
    });
    this.answers = h("input", {
      type: "number",
      class: "cb-answers",
      min: 1,
      value: 1,
      "aria-label": "Answers (n)",
      "aria-describedby": "cb-prompt-e",
      title: ANSWERS,
    });
    this.error = h("p", { class: "cb-error", id: "cb-prompt-e", role: "alert", hidden: true });
    this.said = h("p", { class: "cb-note", role: "status" });
    this.way = h(
      "select",
      { class: "cb-answerway", "aria-label": "Several answers: drawn, or by beam search", title: ANSWERS },
      h("option", { value: "draws", text: "answers", title: ANSWERS }),
      h("option", { value: "beams", text: "beams", title: BEAMS }),
    );
    this.way.addEventListener("change", () => {
      const beams = this.way.value === "beams";
      this.way.title = this.answers.title = beams ? BEAMS : ANSWERS;
      this.answers.setAttribute("aria-label", beams ? "Beams" : "Answers (n)");
      if (beams && Number(this.answers.value) < 2) this.answers.value = 4;
    }); // a beam alone is no search
    this.button = h("button", { type: "button", class: "cb-add", text: "Add", onclick: () => this.add() });
    host.append(
      this.text,
      h(
        "div",
        { class: "cb-row cb-ask" },
        h("label", { class: "cb-inline" }, "max tokens", this.max),
        h("div", { class: "cb-inline" }, this.way, this.answers),
        this.button,
      ),
      this.error,
      this.said,
    );
  }
  // Beams need probabilities: where tokens are made up or repeated there is nothing to choose.
  canSearch(yes) {
    const o = this.way.options[1];
    o.disabled = !yes;
    o.title = yes ? BEAMS : "Beam search needs probabilities: choose a real model under Setup.";
    if (!yes && this.way.value === "beams") {
      this.way.value = "draws";
      this.way.dispatchEvent(new Event("change"));
    }
  }
  add() {
    this.fail("");
    for (const [x, name] of [
      [this.max, "max tokens"],
      [this.answers, "answers"],
    ]) {
      if (x.validity.badInput) return this.fail(`${name}: this is not a number`);
    }
    this.waiting = this.text.value;
    this.app.send("add", { prompt: this.text.value, ...this.asked() });
  }
  asked() {
    const of = (x) => (x.value.trim() === "" ? null : Number(x.value));
    return { max_tokens: of(this.max), n: of(this.answers) ?? 1, beams: this.way.value === "beams" };
  } // for a fork as well
  fail(t) {
    setText(this.error, t);
    this.error.hidden = !t;
    if (t) setText(this.said, "");
    this.text.setAttribute("aria-invalid", String(!!t));
  }
  added(id) {
    if (this.text.value === this.waiting) this.text.value = "";
    setText(this.said, `${id} joins the next step`);
    this.joining = id;
  }
  joined(R) {
    if (this.joining && R.index.has(this.joining)) {
      setText(this.said, "");
      this.joining = null;
    }
  }
}
