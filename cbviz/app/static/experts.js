// A mixture's experts: a row a layer, a cell an expert. How many of the step's tokens each got, by figure and by how full its cell is; and over the run.
import { h, setText } from "./dom.js";
import { nf } from "./format.js";
export class ExpertPanel {
  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.whole = false;
    this.none = h("p", { class: "cb-empty", text: "The experts of a step appear with the first one." });
    this.pick = [
      ["this step", false],
      ["so far", true],
    ].map(([text, whole]) =>
      h("button", {
        type: "button",
        class: "cb-chip",
        text,
        "aria-pressed": String(whole === this.whole),
        onclick: () => {
          this.whole = whole;
          this.pick.forEach((b, i) => b.setAttribute("aria-pressed", String(!!i === whole)));
          this.last = null;
          this.draw();
        },
      }),
    );
    this.said = h("span", { class: "cb-sub" });
    this.grid = h("div", { class: "cb-expertgrid", role: "table", "aria-label": "Tokens of each expert" });
    host.append(
      this.none,
      h("div", { class: "cb-expertshead" }, h("div", { class: "cb-chips" }, ...this.pick), this.said),
      this.grid,
    );
  }
  draw() {
    if (this.host.hidden) return;
    const x = this.app.R && this.app.R.experts;
    this.none.hidden = !!x;
    this.said.hidden = this.grid.hidden = !x;
    if (!x) {
      setText(
        this.none,
        this.app.R && this.app.R.step
          ? "Nothing was computed in this step."
          : "The experts of a step appear with the first one.",
      );
      this.last = null;
      return;
    }
    if (x === this.last) return;
    this.last = x;
    const rows = this.whole ? x.sum : x.load;
    const E = rows[0].length;
    const few = E <= 16;
    let touched = 0;
    let uneven = 0;
    this.grid.style.setProperty("--cb-e", E);
    const head = few
      ? h(
          "div",
          { class: "cb-expertrow cb-expertnames", role: "row" },
          h("span", { class: "cb-expertlayer", role: "columnheader", text: "expert" }),
          h(
            "div",
            { class: "cb-expertcells", role: "presentation" },
            ...rows[0].map((_, e) => h("b", { role: "columnheader", text: String(e) })),
          ),
          h("span", {
            class: "cb-expertover",
            role: "columnheader",
            text: "peak",
            title: "The busiest expert over the mean of its layer",
          }),
        )
      : null;
    this.grid.replaceChildren(
      ...(head ? [head] : []),
      ...rows.map((row, k) => {
        const total = row.reduce((a, b) => a + b, 0);
        const mean = total / E;
        const most = Math.max(...row, 1);
        const over = total ? most / mean : 0;
        touched += row.filter((n) => n).length;
        uneven += over / rows.length;
        return h(
          "div",
          { class: "cb-expertrow", role: "row" },
          h("span", { class: "cb-expertlayer", role: "rowheader", text: `layer ${x.layers[k]}` }),
          h(
            "div",
            { class: "cb-expertcells", role: "presentation" },
            ...row.map((n, e) =>
              h("span", {
                class: n ? "" : "cb-idle",
                role: "cell",
                style: `--f:${Math.round((100 * n) / most)}%`,
                title: `layer ${x.layers[k]}, expert ${e}: ${nf.format(n)} token${n === 1 ? "" : "s"}${n ? `, ${(n / mean).toFixed(1)} times the mean` : ", its weights were not read"}`,
                text: few ? nf.format(n) : "",
              }),
            ),
          ),
          h("span", {
            class: "cb-expertover",
            title: "The busiest expert's tokens over the mean of the layer: 1 is even",
            text: total ? `${over.toFixed(1)}×` : "",
          }),
        );
      }),
    );
    setText(this.said, `${touched} of ${rows.length * E} ${this.whole ? "used" : "touched"}, counted`);
    this.said.title = `Counted: ${touched} of the ${rows.length * E} experts of all layers got a token ${this.whole ? "in the steps so far" : "in this step"}; the busiest of a layer got ${uneven.toFixed(1)} times the layer's mean. Only the weights of touched experts are read.`;
  }
}
