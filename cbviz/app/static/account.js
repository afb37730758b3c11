// Where the tokens of the step and the slots of the pool are: two bars with exact figures; over the run, beside what contiguous memory would have held.
import { h, setText } from "./dom.js";
import { nf, percent } from "./format.js";
const WORDS = {
  partly_empty: "partly empty",
  internal: "never filled",
  external: "in no piece",
  fragmented: "free, in too short runs",
};
const SCHEME = {
  max_model_len: "max_model_len each",
  exact: "prompt + max_tokens",
  buddy: "power of two (buddy)",
  paged: "this run's blocks",
};
const SAME = { internal: "partly_empty", external: "padded" };
export class AccountPanel {
  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.none = h("p", { class: "cb-empty", text: "The accounts of a step appear with the first one." });
    this.now = h("div");
    this.run = h("div");
    host.append(this.none, this.now, this.run);
  }
  bar(parts, total) {
    return h(
      "div",
      {
        class: "cb-bar",
        role: "img",
        "aria-label": parts.map(([k, v]) => `${WORDS[k] || k} ${v}`).join(", "),
      },
      ...parts
        .filter(([, v]) => v > 0)
        .map(([k, v]) =>
          h("i", { class: "cb-acc-" + (SAME[k] || k), style: `flex-grow:${v / (total || 1)}` }),
        ),
    );
  }
  figures(parts, write, first = null) {
    return h(
      "div",
      { class: "cb-accfigures" },
      first,
      ...parts.map(([k, v]) =>
        h(
          "span",
          { "data-part": k, class: v ? "" : "cb-dim" },
          h("i", { class: "cb-acc-" + (SAME[k] || k), "aria-hidden": "true" }),
          h("b", { text: write(v) }),
          " " + (WORDS[k] || k),
        ),
      ),
    );
  }
  block(name, title, [[, total], ...parts], write = (v) => nf.format(v)) {
    return h(
      "div",
      { class: "cb-acc", "data-account": name },
      this.bar(parts, total),
      this.figures(
        parts,
        write,
        h("span", { "data-part": "total" }, h("b", { text: write(total) }), " " + title),
      ),
    );
  }
  draw() {
    const a = this.app.account;
    const R = this.app.R;
    this.none.hidden = !!(a && R.step);
    if (!a || !R.step) {
      this.now.replaceChildren();
      this.run.replaceChildren();
      return;
    }
    if (a === this.last) return;
    this.last = a;
    if (a.missing) {
      setText(this.none, a.missing);
      this.none.hidden = false;
      this.now.replaceChildren();
      this.run.replaceChildren();
      return;
    }
    this.now.replaceChildren(
      this.block("tokens", "tokens:", a.tokens),
      this.block("slots", "slots:", a.slots),
    );
    if (!a.run) return;
    const out = [
      this.block("run-tokens", `tokens in steps 1–${nf.format(a.run.steps)}:`, a.run.tokens),
      this.block("run-slots", "slots × steps:", a.run.slots),
    ];
    const r = a.reservation;
    if (r && r.rows) {
      out.push(
        h("p", {
          class: "cb-sub",
          text: `Share of the pool, mean of ${nf.format(r.steps)} recorded steps, beside contiguous memory:`,
          title: r.assumptions.join("\n"),
        }),
      );
      for (const [name, help, shares, placed] of r.rows) {
        const parts = r.parts.map((p, i) => [p, shares[i]]).filter(([p, v]) => v > 0 || p === "used");
        out.push(
          h(
            "div",
            { class: "cb-acc", "data-scheme": name, title: help },
            h(
              "div",
              { class: "cb-acchead" },
              h("span", { text: SCHEME[name] || name }),
              h("b", { text: placed === null || name === "paged" ? "" : `${percent(placed)} had room` }),
            ),
            this.bar(parts, 1),
            this.figures(parts, percent),
          ),
        );
      }
    } else if (r) {
      out.push(h("p", { class: "cb-note", text: r.missing }));
    }
    this.run.replaceChildren(...out);
  }
}
