// Utilisation: two Plotly lines over steps, in a frame, with the cursor on the overlay. Redrawn at most 5 times a second.
import { Frame } from "./frame.js";
import { percent, rate } from "./format.js";
export class SeriesView {
  // app: { R, th, seek, dirty }; the values of a step come from `figures`.
  constructor(Plotly, host, app, ms = 200, cap = 6000) {
    Object.assign(this, { Plotly, app, ms, cap, last: 0, n: 0, wait: ms, timer: 0 });
    const m = app.R.meta;
    this.share = m.peak_bytes_s > 0 && m.peak_flops_s > 0;
    this.f = new Frame(Plotly, host, {
      role: "chart",
      label: "Utilisation by step",
      dirty: app.dirty,
      traces: (th) => this.traces(th),
      layout: (th) => this.axes(th),
      over: (f, x, g) => this.over(f, x, g),
      click: (p) => app.seek(Math.max(1, Math.min(app.R.steps, Math.round(p.x)))),
      hover: (p) => this.hover(p),
      restyle: (data, th) =>
        data.forEach((d, i) => {
          d.line.color = i < 2 ? th.lines[i] : th.accent;
        }),
    });
  }
  figures(i) {
    // of step i + 1: [bytes/s, FLOP/s], as a share of the peak where there is one
    const { R } = this.app;
    const m = R.meta;
    const s = R.col("busy")[i];
    const b = R.col("bytes")[i] / s;
    const f = R.col("flops")[i] / s;
    if (!(s > 0)) return [null, null];
    return this.share ? [(100 * b) / m.peak_bytes_s, (100 * f) / m.peak_flops_s] : [b / 1e9, f / 1e9];
  }
  traces(th) {
    const t = (i, o) => ({
      type: "scatter",
      mode: "lines",
      x: [],
      y: [],
      line: { width: 1.6, color: th.lines[i], dash: i ? "dot" : "solid" },
      hoverinfo: "none",
      ...o,
    });
    return [
      t(0, {}),
      t(1, this.share ? {} : { yaxis: "y2" }),
      { ...t(0, {}), line: { width: 1.2, color: th.accent, dash: "dash" } },
    ];
  }
  axes(th) {
    const y = {
      rangemode: "tozero",
      nticks: 4,
      showgrid: true,
      gridcolor: th.line,
      showline: false,
      ticks: "",
      autorange: true,
      fixedrange: true,
    };
    const c = (i, t) => ({ title: { text: t, font: { size: 10, color: th.lines[i] }, standoff: 2 } });
    return {
      margin: { l: 40, r: this.share ? 8 : 40, t: 4, b: 18 },
      xaxis: { range: [0.5, 60.5], fixedrange: true, nticks: 5, tickformat: ",d" },
      yaxis: this.share ? { ...y, ticksuffix: "%" } : { ...y, ...c(0, "GB/s") },
      ...(this.share
        ? {}
        : {
            yaxis2: {
              ...y,
              ...c(1, "GFLOP/s"),
              overlaying: "y",
              side: "right",
              showgrid: false,
              color: th.mute,
              zeroline: false,
            },
          }),
    };
  }
  // The steps on screen, from the first one's left edge: the last ones recorded, or where the cursor is if that is earlier.
  from() {
    const { steps, step } = this.app.R;
    const w = this.width();
    const q = w / 4;
    const lo = Math.max(0, Math.ceil(steps / q) * q - w);
    return step > lo ? lo : Math.max(0, Math.ceil(step / q) * q - 3 * q);
  }
  width() {
    const n = this.app.R.steps;
    return n <= 60 ? 60 : n <= 120 ? 120 : n <= 240 ? 240 : 480;
  }
  // The cursor moved, or something was added to the history (reset: it was replaced).
  advance(reset) {
    if (reset) this.n = 0;
    if (this.timer || !(this.app.R.steps > this.n || this.from() !== this.lo || reset)) {
      this.f.dov = true;
      return;
    }
    this.fresh = this.fresh || reset;
    this.timer = setTimeout(() => this.draw(), Math.max(0, this.wait - (performance.now() - this.last)));
  }
  draw() {
    this.timer = 0;
    if (!this.f.ready) {
      this.timer = setTimeout(() => this.draw(), 100);
      return;
    }
    const R = this.app.R;
    const t0 = performance.now();
    const x = [];
    const a = [];
    const b = [];
    const k = [];
    let from = this.fresh ? 0 : this.n;
    from = Math.max(from, R.steps - this.cap);
    for (let i = from; i < R.steps; i++) {
      const [u, v] = this.figures(i);
      x.push(i + 1);
      a.push(u);
      b.push(v);
      k.push(this.share ? 100 * R.col("kernels")[i] : NaN);
    }
    if (this.fresh) {
      this.Plotly.restyle(this.f.gd, { x: [x, x.slice(), x.slice()], y: [a, b, k] });
    } else if (x.length) {
      this.Plotly.extendTraces(this.f.gd, { x: [x, x, x], y: [a, b, k] }, [0, 1, 2], this.cap);
    }
    const w = this.width();
    const lo = (this.lo = this.from());
    const range = this.f.gd._fullLayout.xaxis.range;
    if (range[0] !== lo + 0.5 || range[1] !== lo + w + 0.5) {
      this.Plotly.relayout(this.f.gd, { "xaxis.range": [lo + 0.5, lo + w + 0.5] });
    }
    this.fresh = false;
    this.n = R.steps;
    this.last = performance.now();
    this.wait = Math.max(this.ms, Math.min(3000, 10 * (this.last - t0))); // lines never take more than about a tenth of the main thread
  }
  over(f, x, g) {
    const { R, th } = this.app;
    const c = g.l + (R.step - g.x0) * g.sx;
    if (R.step < 1 || c < g.l || c > g.l + g.w) return;
    x.fillStyle = th.accent;
    x.globalAlpha = 0.8;
    x.fillRect(Math.round(c) - 0.5, g.t, 1.5, g.h);
    x.globalAlpha = 1;
  }
  // What is said of step i + 1 below the lines, figure by figure behind the sign of its line; before the first step the lines' names.
  parts(i) {
    const { R } = this.app;
    const m = R.meta;
    const s = R.col("busy")[i];
    const sign = ["cb-line", "cb-line cb-dot", "cb-line cb-dash"];
    if (i < 0) {
      return [
        [sign[0], "bytes/s"],
        [sign[1], "FLOP/s"],
      ];
    }
    if (!(s > 0)) return [["", "no time taken"]];
    const b = R.col("bytes")[i] / s;
    const f = R.col("flops")[i] / s;
    const k = R.col("kernels")[i];
    if (!isFinite(b)) return [["", "the work of this step is not known"]];
    const of = (v, peak) => (this.share ? ` = ${percent(v / peak)}` : "");
    const out = [
      [sign[0], rate(b, "B/s") + of(b, m.peak_bytes_s)],
      [sign[1], rate(f, "FLOP/s") + of(f, m.peak_flops_s)],
    ];
    if (k > 0) out.push([sign[2], `kernels ran ${percent(k)}`]);
    if (this.above(i)) {
      out[out.length - 1][1] +=
        ". Above the peak: it was measured while the machine was busy; measure it again";
    }
    return out;
  }
  text(i) {
    return this.parts(i)
      .map((p) => p[1])
      .join(", ");
  }
  // A peak that a step passes was measured while something else had the machine.
  above(i) {
    const { R } = this.app;
    const m = R.meta;
    const s = R.col("busy")[i];
    return (
      this.share &&
      m.peaks_measured &&
      m.clock !== "modelled" &&
      s > 0 &&
      Math.max(R.col("bytes")[i] / m.peak_bytes_s, R.col("flops")[i] / m.peak_flops_s) / s > 1.1
    );
  }
  hover(p) {
    const i = p ? Math.round(p.x) - 1 : -1;
    if (i >= 0 && i < this.app.R.steps) {
      this.f.showTip(p, `step ${i + 1}, ${this.app.R.meta.clock}\n${this.text(i).replace(", ", "\n")}`);
    } else {
      this.f.hideTip();
    }
  }
  destroy() {
    clearTimeout(this.timer);
    this.f.destroy();
  }
}
