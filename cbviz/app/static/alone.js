// A request among others against the same request alone: sentences, a map of layers and positions, and one step operator by operator.
import { h, setText } from "./dom.js";
import { nf } from "./format.js";
const MAP_LEFT = 54;
const MAP_BELOW = 16;
const MAP_ABOVE = 12;
const OP_TEXT = {
  qkv: "product: queries, keys, values",
  o: "product: back from the heads",
  gate_up: "product: gate and up",
  down: "product: down",
  head: "product: logits",
};
export const tiny = (x) =>
  x === 0 ? "0" : Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
// Shade 1..7 of a difference in units in the last place, by powers of two: 1: up to a quarter of a unit, 7: above 8. 0: equal, -1: not known.
export const ulpShade = (u) =>
  u === null ? -1 : u === 0 ? 0 : Math.max(1, Math.min(7, Math.ceil(Math.log2(u)) + 3));
export const ULP_SHADES = ["equal", "≤ ¼", "½", "1", "2", "4", "8", "more"];
// Which cell a place on the map is: [layer, position], or null. `w` by `hgt` pixels for positions by layers.
export const cellAt = (x, y, w, hgt, layers, positions) =>
  x < 0 || y < 0 || x >= w || y >= hgt
    ? null
    : [Math.floor((y / hgt) * layers), Math.floor((x / w) * positions)];

export class AloneView {
  constructor(app, root, button) {
    Object.assign(this, { app, button });
    this.title = h("h2");
    this.list = h("ol", { class: "cb-sentences cb-alonesaid" });
    this.canvas = h("canvas", { class: "cb-alonemap", role: "img" });
    this.key = h("div", { class: "cb-alonekey" });
    this.at = h("p", { class: "cb-note", text: "Point at the map to read a cell." });
    this.opsTitle = h("h3");
    this.ops = h("table", { class: "cb-cmptable cb-aloneops" });
    this.box = h(
      "dialog",
      { class: "cb-dialog cb-alone", "aria-label": "A request alone and among others" },
      this.title,
      this.list,
      h("h3", { text: "Keys and values in the cache: layers down, positions across" }),
      this.canvas,
      this.key,
      this.at,
      this.opsTitle,
      (this.opsBox = h("div", { class: "cb-aloneopsbox", tabindex: "0" }, this.ops)),
      h("button", {
        type: "button",
        class: "cb-btn cb-aloneclose",
        text: "Close",
        onclick: () => this.box.close(),
      }),
    );
    root.append(this.box);
    button.addEventListener("click", () => {
      if (app.sel >= 0) app.send("alone", { id: app.R.id(app.sel) });
    });
    this.canvas.addEventListener("mousemove", (e) => this.hover(e));
    this.box.addEventListener("close", () => button.focus({ preventScroll: true }));
    this.sizes = new ResizeObserver(() => this.m && this.paint());
    this.sizes.observe(this.canvas);
  }
  // Called with the page's words: the button is there for a request of which something was really computed.
  draw() {
    const { R, sel, live } = this.app;
    const q = sel >= 0 ? R.rows[sel] : null;
    this.button.hidden = !q || !live.alone;
    this.button.disabled = !q || !q.computed || !!live.loading;
  }
  show(m) {
    this.m = m;
    setText(this.title, `${m.id} among others and alone`);
    this.list.replaceChildren(
      ...m.sentences.map((t, i) =>
        h("li", {
          class: i ? "" : m.equal ? "cb-s-good" : "cb-s-bad",
          text: (i ? "" : m.equal ? "✓ " : "≠ ") + t,
        }),
      ),
    );
    const first = m.ops.findIndex((o) => o[2] > 0);
    setText(
      this.opsTitle,
      `Step ${nf.format(m.step)}, ${m.ops.length > 1 && m.ops[0][1] === "keys and values" ? "layer by layer (the pass is one compiled call)" : "operator by operator"}: ${m.rows[0]} rows among others, ${m.rows[1]} alone${first < 0 ? "; nothing differs" : ""}`,
    );
    this.opsBox.hidden = first < 0;
    this.ops.replaceChildren(
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ...["layer", "what", "largest difference", "units in the last place", "numbers that differ"].map(
            (t) => h("th", { scope: "col", text: t }),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        ...m.ops.map(([l, op, d, u, s], i) =>
          h(
            "tr",
            { class: i === first ? "cb-alonefirst" : "" },
            h("th", { scope: "row", text: l < 0 ? "" : String(l) }),
            h("td", { text: (OP_TEXT[op] ?? op) + (i === first ? " ← the first" : "") }),
            h("td", { text: d ? tiny(d) : "equal" }),
            h("td", { text: d ? tiny(u) : "" }),
            h("td", { text: d ? (100 * s).toFixed(0) + " %" : "" }),
          ),
        ),
      ),
    );
    if (!this.box.open) this.box.showModal();
    this.paint();
    this.app.say(m.sentences[0]);
  }
  colours() {
    const css = getComputedStyle(this.box);
    const v = (n) => css.getPropertyValue("--cb-" + n).trim();
    return {
      back: v("track"),
      hot: v("accent"),
      line: v("line"),
      mute: v("mute"),
      fg: v("fg"),
      bad: v("bad"),
    };
  }
  paint() {
    const m = this.m;
    const c = this.canvas;
    const dpr = devicePixelRatio || 1;
    const L = m.apart.length;
    const P = L ? m.apart[0].length : 0;
    const W = c.clientWidth;
    const H = MAP_ABOVE + MAP_BELOW + Math.max(60, Math.min(190, 6 * L));
    if (!W || !P) return;
    c.style.height = H + "px";
    c.width = Math.round(W * dpr);
    c.height = Math.round(H * dpr);
    const g = c.getContext("2d");
    const th = this.colours();
    const w = W - MAP_LEFT - 4;
    const hh = H - MAP_ABOVE - MAP_BELOW;
    g.scale(dpr, dpr);
    g.font = "11px " + this.app.th.font;
    this.area = { w, hh };
    for (let l = 0; l < L; l++) {
      for (let p = 0; p < P; p++) {
        const s = ulpShade(m.ulps[l][p]);
        const x = MAP_LEFT + (w * p) / P;
        const y = MAP_ABOVE + (hh * l) / L;
        const cw = w / P;
        const ch = hh / L;
        g.globalAlpha = 1;
        g.fillStyle = th.back;
        g.fillRect(x, y, cw, ch);
        if (s > 0) {
          g.globalAlpha = 0.12 + (0.88 * s) / 7;
          g.fillStyle = th.hot;
          g.fillRect(x, y, cw, ch);
        } else if (s < 0) {
          g.globalAlpha = 0.5;
          g.strokeStyle = th.mute;
          g.beginPath();
          g.moveTo(x, y + ch);
          g.lineTo(x + cw, y);
          g.stroke();
        }
      }
    }
    g.globalAlpha = 1;
    g.strokeStyle = th.line;
    g.strokeRect(MAP_LEFT - 0.5, MAP_ABOVE - 0.5, w + 1, hh + 1);
    g.fillStyle = th.mute;
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (const l of [0, Math.floor((L - 1) / 2), L - 1]) {
      g.fillText(`layer ${l}`, MAP_LEFT - 6, MAP_ABOVE + (hh * (l + 0.5)) / L);
    }
    g.textAlign = "left";
    g.textBaseline = "top";
    const x0 = MAP_LEFT + (w * m.num_prompt) / P;
    g.fillText("0, prompt", MAP_LEFT, MAP_ABOVE + hh + 3);
    if (m.num_prompt < P) {
      g.fillText(`${m.num_prompt}, output`, Math.min(x0, MAP_LEFT + w - 60), MAP_ABOVE + hh + 3);
      g.strokeStyle = th.fg;
      g.setLineDash([3, 3]);
      g.beginPath();
      g.moveTo(x0, MAP_ABOVE);
      g.lineTo(x0, MAP_ABOVE + hh);
      g.stroke();
      g.setLineDash([]);
    }
    g.strokeStyle = th.fg;
    for (const [start] of m.chunks) {
      const x = MAP_LEFT + (w * start) / P;
      g.beginPath();
      g.moveTo(x + 0.5, MAP_ABOVE - 5);
      g.lineTo(x + 0.5, MAP_ABOVE - 1);
      g.stroke();
    }
    g.fillStyle = th.bad;
    g.textAlign = "center";
    g.textBaseline = "bottom";
    for (const t of m.tokens) {
      if (t.changed) g.fillText("≠", MAP_LEFT + (w * Math.min(P - 0.5, t.position - 0.5)) / P, MAP_ABOVE - 1);
    }
    this.key.replaceChildren(
      h("span", { class: "cb-note", text: "units in the last place:" }),
      ...ULP_SHADES.map((t, s) =>
        h(
          "span",
          { class: "cb-key" },
          h("i", {
            class: "cb-aloneswatch",
            "aria-hidden": "true",
            style: s ? `background:${th.hot};opacity:${0.12 + (0.88 * s) / 7}` : `background:${th.back}`,
          }),
          t,
        ),
      ),
      h("span", {
        class: "cb-note",
        text: "ticks above: where a chunk begins; ≠: alone, the next token would be another; struck out: no longer in the cache",
      }),
    );
    c.setAttribute(
      "aria-label",
      `Differences of ${m.id}: ${L} layers by ${P} positions. ${m.sentences.join(" ")}`,
    );
  }
  hover(e) {
    const m = this.m;
    const r = this.canvas.getBoundingClientRect();
    const L = m.apart.length;
    const P = m.apart[0].length;
    const at = cellAt(
      e.clientX - r.left - MAP_LEFT,
      e.clientY - r.top - MAP_ABOVE,
      this.area.w,
      this.area.hh,
      L,
      P,
    );
    if (!at) return;
    const [l, p] = at;
    const a = m.apart[l][p];
    const k = m.chunks.findLastIndex((c) => c[0] <= p);
    const t = m.tokens.find((x) => x.position === p + 1);
    setText(
      this.at,
      `layer ${l}, position ${p} (${p < m.num_prompt ? "prompt" : "output"}, ${m.chunks[k][1] ? `computed in step ${nf.format(m.chunks[k][1])}` : "from the prefix cache"}): ` +
        (a === null
          ? "no longer in the cache"
          : a === 0
            ? "equal, bit for bit"
            : `keys and values differ by up to ${tiny(a)}, ${tiny(m.ulps[l][p])} units in the last place`) +
        (t
          ? `; then “${t.text}”, log-probability ${t.apart ? `differs by ${tiny(t.apart)} nats` : "equal"}, lead ${tiny(t.gap)} nats${t.changed ? `; alone “${t.text_alone}”` : ""}`
          : ""),
    );
  }
  destroy() {
    this.sizes.disconnect();
  }
}
