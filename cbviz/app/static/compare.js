// Two to four runs side by side: their timelines with linked cursors, their figures, where the schedules part and why, and whether the outputs are equal.
import { Run, Timeline } from "./store.js";
import { STATES, STATE_TEXT, clamp } from "./color.js";
import { paintTimeline } from "./raster.js";
import { nf, seconds, plural, cut } from "./format.js";
import { isolated } from "./texts.js";
import { sentence, toneOf, METRICS } from "./panels.js";
import { errorLine, fail } from "./popover.js";
import { h, sync, setText, setAttr } from "./dom.js";
const TICKS = 2000;
const GUTTER = 62;
const MOST = 4;
const MORE = {
  num_steps: "steps",
  num_finished: "finished",
  num_aborted: "aborted",
  total_throughput: "in + out",
  p99_itl_s: "ITL p99",
  padded_tokens: "padded",
  kv_usage_peak: "KV held, peak",
  goodput: "goodput",
};
// 1, 2 or 5 times a power of ten, so that about six of them fit.
export function tickStep(top) {
  const raw = top / 6 || 1;
  const p = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((k) => k * p).find((d) => d >= raw * 0.999);
}

// A timeline on the clock instead of on steps: `ticks` columns from a to b seconds. Of states shorter than a column the last one stays.
export function byClock(R, a, b, ticks = TICKS) {
  const t0 = R.col("t0");
  const t1 = R.col("t1");
  const n = R.steps;
  const out = new Timeline(R.tl.n);
  const at = (s) => 1 + Math.floor(((ticks - 1) * (s - a)) / (b - a || 1));
  const start = (step) => at(step <= n ? t0[step - 1] : t1[n - 1]);
  for (let r = 0; r < R.tl.n; r++) {
    for (let i = 0; i < R.tl.len[r]; i++) {
      const w = R.tl.rows[r][i];
      out.push(r, start(w >>> 5), w & 31);
    }
  }
  out.t = n ? at(t1[n - 1]) + 1 : 1;
  return out;
}
// The cursor of each run for step `at` of the first one.
export const beside = (at, runs, table) =>
  runs.map((r, i) =>
    i === 0 || !table ? clamp(at, 0, r.steps) : table[i - 1].there[clamp(at, 0, runs[0].steps)],
  );
export const baseOf = (i, step, table) => (i === 0 || !table ? step : table[i - 1].back[step]);

export class ComparePanel {
  constructor(app, host) {
    Object.assign(this, {
      app,
      host,
      open: false,
      picks: [],
      files: [],
      branches: [],
      runs: [],
      at: 0,
      by: "step",
      pending: false,
    });
    this.chips = h("div", { class: "cb-chips" });
    this.file = h("select", {
      class: "cb-cmp-file",
      "aria-label": "Add a saved run",
      onchange: () => {
        if (this.file.value) this.pick("file:" + this.file.value);
        this.file.value = "";
      },
    });
    this.align = h(
      "select",
      {
        class: "cb-cmp-align",
        "aria-label": "Align the cursors by",
        onchange: () => {
          this.by = this.align.value;
          this.dirty = true;
          this.draw();
        },
      },
      h("option", { value: "step", text: "by step" }),
      h("option", { value: "time", text: "by time" }),
    );
    this.scrub = h("input", {
      type: "range",
      class: "cb-cmp-scrub",
      min: 0,
      value: 0,
      "aria-label": "Step of the first run; the others follow",
      oninput: () => this.go(Number(this.scrub.value)),
    });
    this.error = errorLine("cb-cmp-error");
    this.lanes = h("div", { class: "cb-lanes" });
    this.table = h("table", { class: "cb-cmptable" });
    this.notes = h("p", { class: "cb-note" });
    this.pairs = h("div", { class: "cb-pairs" });
    this.after = h(
      "div",
      { class: "cb-cmpafter", hidden: true },
      h("label", { class: "cb-cmpscrub" }, h("span", { text: "cursor" }), this.scrub, this.align),
      h("div", { class: "cb-cmpcols" }, h("div", {}, this.table, this.notes), this.pairs),
    );
    host.append(
      h("div", { class: "cb-cmppicks" }, this.chips, this.file),
      this.error,
      this.lanes,
      this.after,
    );
    this.sizes = new ResizeObserver(() => {
      this.dirty = true;
      this.paint();
    });
    this.sizes.observe(this.lanes);
  }
  show(open) {
    this.open = open;
    if (open) {
      this.app.send("files");
      this.defaults();
      this.ask();
    }
  }
  defaults() {
    const known = this.branches.map((b) => "branch:" + b.name);
    this.picks = this.picks.filter((p) => p.startsWith("file:") || known.includes(p));
    if (this.picks.length < 2) {
      const me = this.branches.find((b) => b.shown);
      const list = [
        ...new Set(
          [me && me.parent, me && me.name, ...this.branches.map((b) => b.name)].filter(
            (n) => n && known.includes("branch:" + n),
          ),
        ),
      ];
      this.picks = list.slice(0, 2).map((n) => "branch:" + n);
    }
    this.drawPicks();
  }
  family(m) {
    this.branches = m.branches;
    this.name = m.name;
    if (this.open) {
      this.defaults();
      this.drawPicks();
      if (!this.runs.length) this.ask();
    }
  }
  saved(m) {
    this.files = m.files;
    this.file.replaceChildren(
      h("option", { value: "", text: this.files.length ? "add a saved run …" : "no saved runs" }),
      ...this.files.map((f) => h("option", { value: f.id, text: cut(f.label, 60) })),
    );
    this.file.disabled = !this.files.length;
  }
  drawPicks() {
    const items = [
      ...this.branches.map((b) => ["branch:" + b.name, b.name]),
      ...this.picks
        .filter((p) => p.startsWith("file:"))
        .map((p) => [p, this.files.find((f) => "file:" + f.id === p)?.label ?? p.slice(5)]),
    ];
    sync(
      this.chips,
      items,
      (x) => x[0],
      ([key, name]) =>
        h("button", {
          type: "button",
          class: "cb-chip cb-pick",
          "data-pick": key,
          title: "In or out of the comparison",
          dir: "auto",
          text: cut(name, 40),
          onclick: () => this.pick(key),
        }),
      (n, [key]) => {
        setAttr(n, "aria-pressed", String(this.picks.includes(key)));
      },
    );
  }
  pick(key) {
    this.picks = this.picks.includes(key) ? this.picks.filter((p) => p !== key) : [...this.picks, key];
    const at = (p) => {
      const i = this.branches.findIndex((b) => "branch:" + b.name === p);
      return i < 0 ? 1e9 : i;
    };
    this.picks.sort((a, b) => at(a) - at(b));
    this.drawPicks();
    this.ask();
  }
  ask() {
    fail(this.error, "");
    if (this.picks.length < 2 || this.picks.length > MOST) {
      this.clear();
      this.error.classList.add("cb-quiet");
      fail(
        this.error,
        this.branches.length + this.files.length < 2
          ? "There is one run only: fork it, change something, and compare the two."
          : `Pick 2 to ${MOST} runs.`,
      );
      return;
    }
    this.pending = true;
    this.app.send("compare", { picks: this.picks });
  }
  clear() {
    this.runs = [];
    this.data = null;
    this.lanes.replaceChildren();
    this.lanes._keys = null;
    this.after.hidden = true;
  }
  said(m) {
    this.pending = false;
    this.error.classList.remove("cb-quiet");
    fail(this.error, m.error);
    if (m.error) this.clear();
  }
  compared(m) {
    if (m.picks.join() !== this.picks.join()) return;
    this.next = m;
    this.coming = [];
  }
  comparedRun(m, bufs) {
    if (!this.next) return;
    const buf = {};
    m.b.forEach((n, i) => {
      buf[n] = bufs[i];
    });
    const R = new Run(m);
    R.apply(m, buf);
    this.coming[m.i] = R;
    if (m.i < this.next.runs.length - 1) return;
    this.data = this.next;
    this.runs = this.coming;
    this.next = null;
    this.pending = false;
    if (!this.data.by_time) this.by = "step";
    this.align.value = this.by;
    this.align.options[1].disabled = !this.data.by_time;
    this.align.title = this.data.by_time ? "" : "The clocks differ: runs can be aligned by step only";
    this.at = this.shownAt() ?? Math.min(this.at, this.most());
    this.host.classList.toggle("cb-cmpmany", this.runs.length > 2);
    this.build();
  }
  most() {
    return Math.max(0, ...this.runs.map((R) => R.steps));
  }
  get times() {
    return this.by === "time" ? this.data.by_time : null;
  }
  get shown() {
    return this.picks.indexOf("branch:" + this.name);
  }
  shownAt() {
    const k = this.shown;
    const R = this.app.R;
    return k < 0 || !R || !this.data
      ? null
      : baseOf(k, clamp(R.step, 0, this.data.runs[k].steps), this.times);
  }
  go(at, fromPage = false) {
    this.at = at;
    const c = this.cursors();
    const k = this.shown;
    this.drawCursors();
    if (!fromPage && k >= 0 && c[k] !== this.app.R.step) this.app.seek(c[k]);
  }
  cursors() {
    return beside(this.at, this.data.runs, this.times);
  }
  // Called with the page's words: the page's cursor takes ours along, and a run that has grown is compared again.
  draw() {
    if (!this.open || !this.data) return;
    const k = this.shown;
    const { R, live } = this.app;
    this.paint();
    if (k >= 0 && this.data.runs[k] && R) {
      if (this.cursors()[k] !== clamp(R.step, 0, this.data.runs[k].steps)) this.go(this.shownAt(), true);
      if (R.steps !== this.data.runs[k].steps && !this.pending && !live.playing && !live.loading) this.ask();
    }
  }
  build() {
    const d = this.data;
    this.after.hidden = false;
    this.scrub.max = this.by === "time" ? d.runs[0].steps : this.most();
    this.lanes.replaceChildren(
      ...d.runs.map((r, i) => {
        const b = this.picks[i].startsWith("branch:")
          ? this.branches.find((x) => "branch:" + x.name === this.picks[i])
          : null;
        const c = h("canvas", { role: "img", "aria-label": `Timeline of ${r.name}` });
        const line = h("div", { class: "cb-lanecursor" });
        const now = h("span", { class: "cb-note" });
        const n = h(
          "div",
          { class: "cb-lane", "data-run": r.name },
          h(
            "div",
            { class: "cb-lanehead" },
            h("b", { dir: "auto", text: cut(r.name, 80), title: r.name }),
            h("span", { class: "cb-note", text: plural(r.steps, "step") }),
            now,
            h("span", { class: "cb-grow" }),
            b && b.live && !b.done
              ? h("button", {
                  type: "button",
                  class: "cb-btn cb-small cb-finish",
                  text: "Run to its end",
                  onclick: () => this.app.send("finish", { name: r.name }),
                })
              : null,
          ),
          h("div", { class: "cb-lanebox" }, c, line),
        );
        c.addEventListener("click", (e) => this.go(baseOf(i, this.stepAt(i, e), this.times)));
        c.addEventListener("mousemove", (e) => {
          c.title = this.describe(i, e);
        });
        Object.assign(n, { _c: c, _line: line, _now: now });
        return n;
      }),
    );
    this.table.replaceChildren(
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th"),
          ...d.runs.map((r) => h("th", { scope: "col", dir: "auto", text: cut(r.name, 24), title: r.name })),
        ),
      ),
      h(
        "tbody",
        {},
        ...d.rows.map((x) =>
          h(
            "tr",
            { "data-metric": x.key },
            h("th", { scope: "row", text: METRICS[x.key]?.[0] ?? MORE[x.key] ?? x.title, title: x.title }),
            ...x.cells.map((v, i) => {
              const q = i ? x.ratios[i - 1] : null;
              return h(
                "td",
                {},
                v.replace("tokens/s", "tok/s"),
                i
                  ? h("em", {
                      text:
                        v === x.cells[0]
                          ? "="
                          : q === null
                            ? ""
                            : q > 100 || q < 0.01
                              ? ""
                              : `${q.toFixed(2)}×`,
                    })
                  : null,
              );
            }),
          ),
        ),
      ),
    );
    setText(this.notes, d.notes.join("; "));
    this.pairs.replaceChildren(...d.pairs.map((p, i) => this.pair(p, i + 1)));
    this.dirty = true;
    this.paint();
  }
  pair(p, i) {
    const base = this.data.runs[0].name;
    const side = (name, list) =>
      list.length ? h("div", {}, h("p", { class: "cb-sub", text: name }), this.list(list)) : null;
    const at = p.parting;
    return h(
      "section",
      { class: "cb-pair", "data-pair": p.name },
      h("h2", { text: `${isolated(p.name)} against ${isolated(base)}` }),
      h("p", {
        class: `cb-proof ${p.tokens_equal ? "cb-s-good" : p.partial ? "" : "cb-s-bad"}`,
        text: (p.tokens_equal ? "✓ " : p.partial ? "" : "✗ ") + (p.proof || "tokens were not recorded"),
      }),
      p.so_far !== null
        ? h("p", {
            class: "cb-proof",
            text: `schedules and block tables are equal up to step ${nf.format(p.so_far)}, as far as both have come`,
          })
        : at
          ? h(
              "div",
              { class: "cb-parting" },
              h(
                "p",
                {},
                h("b", {
                  text: `${p.schedules_equal ? (p.blocks_equal ? "Configurations" : "Block tables") : "Schedules"} part at step ${nf.format(at.step)} `,
                }),
                h("button", {
                  type: "button",
                  class: "cb-btn cb-small cb-goparting",
                  text: "Go there",
                  onclick: () =>
                    this.go(this.by === "time" ? Math.min(at.step, this.data.runs[0].steps) : at.step),
                }),
              ),
              at.changed.length ? h("p", { class: "cb-note", text: at.changed.join("; ") }) : null,
              side(base, at.ours),
              side(p.name, at.theirs),
            )
          : h("p", {
              class: "cb-proof cb-s-good",
              text: "✓ schedules and block tables are equal, step by step",
            }),
      p.causes.length
        ? h(
            "div",
            {},
            h("p", { class: "cb-sub", text: "What the difference comes from" }),
            this.list(p.causes),
          )
        : null,
      ...p.notes.filter((t) => !t.startsWith("times")).map((t) => h("p", { class: "cb-note", text: t })),
    );
  }
  list(items) {
    return h(
      "ol",
      { class: "cb-sentences" },
      ...items.map((s) => h("li", { class: "cb-s-" + toneOf(s.kind) }, ...sentence(this.app, s.text, s.ids))),
    );
  }
  // Timelines -----------------------------------------------------------------------------------------------------------
  span() {
    const t = this.runs.filter((R) => R.steps);
    const a = Math.min(...t.map((R) => R.col("t0")[0]));
    const b = Math.max(...t.map((R) => R.col("t1")[R.steps - 1]));
    return t.length ? [a, b] : [0, 1];
  }
  paint() {
    if (!this.dirty || !this.open || !this.data) return;
    const w = this.lanes.clientWidth;
    if (!w) return;
    this.dirty = false;
    const dpr = devicePixelRatio || 1;
    const { th } = this.app;
    const time = this.by === "time";
    const [a, b] = time ? this.span() : [0, 0];
    this.range = time ? [0.5, TICKS + 0.5] : [0.5, Math.max(10, this.most()) + 0.5];
    this.scrub.max = time ? this.data.runs[0].steps : this.most();
    [...this.lanes.children].forEach((n, i) => {
      const R = this.runs[i];
      const rows = Math.max(1, R.ids.length);
      const H0 = clamp(rows * 11, 66, 132);
      const c = n._c;
      const W = Math.round(w * dpr);
      const H = Math.round(H0 * dpr);
      const g = Math.round(GUTTER * dpr);
      const last = i === this.runs.length - 1;
      const foot = last ? Math.round(16 * dpr) : 0;
      c.width = W;
      c.height = H + foot;
      c.style.height = H0 + foot / dpr + "px";
      n._h = H0;
      const tl = time ? byClock(R, a, b) : R.tl;
      const im = new ImageData(W - g, H);
      const x = c.getContext("2d");
      paintTimeline(
        new Uint32Array(im.data.buffer),
        W - g,
        H,
        tl,
        { x0: this.range[0], x1: this.range[1], y0: -0.5, y1: rows - 0.5 },
        th.lut,
        dpr,
      );
      x.putImageData(im, g, 0);
      x.setTransform(dpr, 0, 0, dpr, 0, 0);
      x.font = `10px ${th.font}`;
      x.fillStyle = th.mute;
      x.textAlign = "right";
      x.textBaseline = "middle";
      const each = Math.max(1, Math.ceil(11 / (H0 / rows)));
      for (let r = 0; r < R.ids.length; r += each) {
        x.fillText(isolated(cut(R.id(r), 9)), GUTTER - 6, ((r + 0.5) * H0) / rows);
      }
      if (last) {
        x.textAlign = "center";
        const top = time ? b - a : this.range[1] - 0.5;
        const d = tickStep(top);
        for (let v = d; v <= top * 0.97; v += d) {
          x.fillText(
            time ? seconds(v) : nf.format(v),
            GUTTER + ((time ? v : v - 0.5) / top) * (w - GUTTER),
            H0 + 9,
          );
        }
        x.textAlign = "right";
        x.fillText(time ? "time" : "step", GUTTER - 6, H0 + 9);
      }
    });
    this.drawCursors();
  }
  xOf(i, step) {
    const R = this.runs[i];
    if (this.by !== "time") return step + 0.5;
    const [a, b] = this.span();
    return step ? 1.5 + ((TICKS - 1) * (R.col("t1")[step - 1] - a)) / (b - a || 1) : 0.5;
  }
  drawCursors() {
    const c = this.cursors();
    const [x0, x1] = this.range || [0, 1];
    this.scrub.value = this.by === "time" ? c[0] : this.at;
    [...this.lanes.children].forEach((n, i) => {
      const R = this.runs[i];
      const s = c[i];
      const f = (this.xOf(i, s) - x0) / (x1 - x0);
      const k = s - 1;
      n._line.style.left = `calc(${GUTTER}px + (100% - ${GUTTER}px) * ${clamp(f, 0, 1)})`;
      n._line.style.height = (n._h || 0) + "px";
      setText(
        n._now,
        s
          ? `at step ${nf.format(s)}: ${R.col("running")[k]} running, ${R.col("waiting")[k]} waiting, ${seconds(R.col("t1")[k])} ${R.meta.clock}`
          : "at the start",
      );
      n.dataset.step = s;
    });
  }
  place(i, e) {
    const r = e.currentTarget.getBoundingClientRect();
    const f = (e.clientX - r.left - GUTTER) / (r.width - GUTTER);
    const rows = this.runs[i].ids.length;
    return {
      x: this.range[0] + clamp(f, 0, 1) * (this.range[1] - this.range[0]),
      r: Math.floor((e.clientY - r.top) / (this.lanes.children[i]._h / Math.max(1, rows))),
    };
  }
  stepAt(i, e) {
    const R = this.runs[i];
    const { x } = this.place(i, e);
    if (this.by !== "time") return clamp(Math.round(x), 0, R.steps);
    const [a, b] = this.span();
    const s = a + ((x - 1) / (TICKS - 1)) * (b - a);
    const t1 = R.col("t1");
    let n = 0;
    while (n < R.steps && t1[n] < s) n++;
    return Math.min(R.steps, n + 1);
  }
  describe(i, e) {
    const R = this.runs[i];
    const { r } = this.place(i, e);
    const step = this.stepAt(i, e);
    const cell = r >= 0 && r < R.ids.length ? R.tl.at(r, step) : null;
    return cell ? `${R.name(r)}, step ${step}: ${STATE_TEXT[STATES[cell.state]]}` : `step ${step}`;
  }
  destroy() {
    this.sizes.disconnect();
  }
}
