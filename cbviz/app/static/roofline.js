// The roofline: decode and prefill of each step as points under the machine's roof; the cursor's step ringed. Redrawn at most 5 times a second, and only while it is shown.
import { Frame } from "./frame.js";
import { STATES } from "./color.js";
import { percent, rate, sig, cut } from "./format.js";
const ROOF_STEPS = 600;
const PHASES = [
  ["decode", "dflops", "dbytes", "circle"],
  ["prefill", "pflops", "pbytes", "diamond"],
  ["both", "flops", "bytes", "square"],
];
const PREFILL = new Set(["prefill", "recompute"]);
const DECODE = new Set(["decode", "accepted", "rejected"]);
export class RoofView {
  constructor(Plotly, host, app, ms = 200) {
    Object.assign(this, { Plotly, app, ms, last: 0, timer: 0, points: [], shown: false });
    this.f = new Frame(Plotly, host, {
      role: "chart",
      label: "Roofline",
      dirty: app.dirty,
      traces: (th) => this.traces(th),
      layout: () => this.axes(),
      over: (f, x, g) => this.over(f, x, g),
      click: (p) => {
        const q = this.near(p);
        if (q) app.seek(q.step);
      },
      hover: (p) => this.hover(p),
      restyle: (data, th) => {
        data[0].line.color = th.mute;
        PHASES.forEach(([k], i) => {
          data[i + 1].marker.color = this.color(th, k);
        });
      },
    });
  }
  color(th, kind) {
    return kind === "both" ? th.mute : th.state[kind][0];
  }
  traces(th) {
    return [
      { type: "scatter", mode: "lines", x: [], y: [], line: { width: 2, color: th.mute }, hoverinfo: "none" },
      ...PHASES.map(([k, , , symbol]) => ({
        type: "scatter",
        mode: "markers",
        x: [],
        y: [],
        marker: { size: 6, symbol, color: this.color(th, k), opacity: 0.65 },
        hoverinfo: "none",
      })),
    ];
  }
  axes() {
    const a = {
      type: "log",
      fixedrange: true,
      showgrid: false,
      dtick: 1,
      tickformat: "~s",
      exponentformat: "SI",
    };
    return {
      margin: { l: 40, r: 8, t: 16, b: 30 },
      xaxis: { ...a, title: { text: "operations a byte moved" } },
      yaxis: { ...a, nticks: 4 },
    };
  }
  get ridge() {
    const m = this.app.R.meta;
    return m.peak_bytes_s > 0 && m.peak_flops_s > 0 ? m.peak_flops_s / m.peak_bytes_s : 0;
  }
  roof(x) {
    const m = this.app.R.meta;
    return Math.min(m.peak_flops_s, x * m.peak_bytes_s);
  }
  // The points of step i + 1: decode and prefill where they are known apart, else the whole.
  of(i) {
    const { R } = this.app;
    const s = R.col("busy")[i];
    if (!(s > 0)) return [];
    const all = PHASES.map(([kind, f, b]) => ({
      kind,
      step: i + 1,
      x: R.col(f)[i] / R.col(b)[i],
      y: R.col(f)[i] / s,
    })).filter((p) => isFinite(p.x) && p.x > 0 && p.y > 0);
    const apart = all.filter((p) => p.kind !== "both");
    return apart.length ? apart : all;
  }
  show(on) {
    this.shown = on;
    if (on) {
      this.last = 0;
      this.advance();
    }
  }
  advance() {
    if (!this.shown) return;
    this.f.dov = true;
    if (!this.timer) {
      this.timer = setTimeout(() => this.draw(), Math.max(0, this.ms - (performance.now() - this.last)));
    }
  }
  draw() {
    this.timer = 0;
    if (!this.shown) return;
    if (!this.f.ready) {
      this.timer = setTimeout(() => this.draw(), 100);
      return;
    }
    const R = this.app.R;
    const m = R.meta;
    const t0 = performance.now();
    const points = [];
    for (let i = Math.max(0, R.steps - ROOF_STEPS); i < R.steps; i++) points.push(...this.of(i));
    if (R.step && R.step <= R.steps - ROOF_STEPS) points.push(...this.of(R.step - 1));
    this.points = points;
    const xs = points.map((p) => Math.log10(p.x));
    const ys = points.map((p) => Math.log10(p.y));
    const ridge = this.ridge;
    if (ridge) {
      xs.push(Math.log10(ridge) - 1, Math.log10(ridge) + 0.7);
      ys.push(Math.log10(m.peak_flops_s));
    }
    const lo = Math.min(...xs, 0) - 0.15;
    const hi = Math.max(...xs, 1) + 0.15;
    const bottom = Math.min(...ys, ...(ridge ? [Math.log10(this.roof(10 ** Math.min(...xs)))] : [9])) - 0.15;
    const top = Math.max(...ys, 10) + 0.2;
    const x = [
      ridge ? [10 ** lo, ridge, 10 ** hi] : [],
      ...PHASES.map(([k]) => points.filter((p) => p.kind === k).map((p) => p.x)),
    ];
    const y = [
      ridge ? [this.roof(10 ** lo), m.peak_flops_s, m.peak_flops_s] : [],
      ...PHASES.map(([k]) => points.filter((p) => p.kind === k).map((p) => p.y)),
    ];
    this.Plotly.update(this.f.gd, { x, y }, { "xaxis.range": [lo, hi], "yaxis.range": [bottom, top] });
    this.last = performance.now();
    this.ms = Math.max(200, Math.min(3000, 10 * (this.last - t0)));
    this.f.dov = true;
    this.app.dirty();
  }
  at(g, p) {
    return [g.l + (Math.log10(p.x) - g.x0) * g.sx, g.t + (Math.log10(p.y) - g.y0) * g.sy];
  }
  over(f, x, g) {
    const { R, th } = this.app;
    const m = R.meta;
    x.font = `11px ${th.font}`;
    x.fillStyle = th.mute;
    x.textBaseline = "alphabetic";
    if (!this.points.length) {
      x.textAlign = "center";
      x.fillText(
        R.steps ? "the work of these steps is not known" : "the points appear with the first step",
        g.l + g.w / 2,
        g.t + g.h / 2,
      );
      return;
    }
    if (this.ridge) {
      const c = g.l + (Math.log10(this.ridge) - g.x0) * g.sx;
      const y = g.t - 4;
      x.textAlign = "left";
      x.fillText("FLOP/s", 2, g.t - 4);
      x.textAlign = "right";
      if (c - g.l > 90) x.fillText(c - g.l > 200 ? "← reading memory is the limit" : "← memory", c - 6, y);
      x.textAlign = "left";
      if (g.l + g.w - c > 60) {
        x.fillText(g.l + g.w - c > 140 ? "arithmetic is the limit →" : "arithmetic →", c + 6, y);
      }
      x.strokeStyle = th.line;
      x.setLineDash([3, 3]);
      x.beginPath();
      x.moveTo(c, g.t);
      x.lineTo(c, g.t + g.h);
      x.stroke();
      x.setLineDash([]);
    }
    x.lineWidth = 2;
    x.strokeStyle = th.accent;
    x.fillStyle = th.fg;
    for (const p of R.step ? this.of(R.step - 1) : []) {
      const [px, py] = this.at(g, p);
      x.beginPath();
      x.arc(px, py, 7, 0, 7);
      x.stroke();
      x.textAlign = px > g.l + g.w * 0.7 ? "right" : "left";
      x.fillText(p.kind, px + (x.textAlign === "right" ? -11 : 11), py + 4);
    }
  }
  near(p) {
    if (!p || !this.f.ready) return null;
    const g = this.f.geom();
    let best = null;
    let d = 14 * 14;
    for (const q of this.points) {
      const [a, b] = this.at(g, q);
      const e = (a - p.px) ** 2 + (b - p.py) ** 2;
      if (e <= d) {
        d = e;
        best = q;
      }
    }
    return best;
  }
  limit(p) {
    return !this.ridge ? "" : p.x < this.ridge ? "reading memory is the limit" : "arithmetic is the limit";
  }
  // Who was computed in that step, by what the timeline says of it.
  who(p) {
    const { R } = this.app;
    const s = [];
    for (let r = 0; r < R.ids.length; r++) {
      const q = R.tl.at(r, p.step);
      if (!q) continue;
      if (
        (p.kind !== "decode" && PREFILL.has(STATES[q.state])) ||
        (p.kind !== "prefill" && DECODE.has(STATES[q.state]))
      ) {
        s.push(R.id(r));
      }
    }
    return s;
  }
  say(p) {
    const q = this.ridge ? p.y / this.roof(p.x) : 0;
    const share =
      q > 1.02
        ? ", above the roof: measure the peaks again while nothing else runs"
        : q
          ? `, ${percent(q)} of the roof`
          : "";
    return `${p.kind}: ${rate(p.y, "FLOP/s")}${share}; ${sig(p.x)} operations a byte${this.ridge ? `, so ${this.limit(p)}` : ""}`;
  }
  text(i) {
    const s = this.of(i);
    return s.length ? s.map((p) => this.say(p)).join("  ·  ") : "the work of this step is not known";
  }
  hover(p) {
    const q = this.near(p);
    if (!q) {
      this.f.hideTip();
      return;
    }
    const who = this.who(q);
    const both = this.of(q.step - 1).length > 1;
    this.f.showTip(
      p,
      `step ${q.step}, ${this.app.R.meta.clock}\n${this.say(q).replace("; ", "\n")}${both ? "\nbeside the other kind, in the step's whole time" : ""}\n${cut(who.join(", "), 60)}`,
    );
  }
  destroy() {
    clearTimeout(this.timer);
    this.f.destroy();
  }
}
