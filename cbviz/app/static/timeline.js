// Requests x steps: what each request was at each step. The picked request is a row, the cursor a column.
import { paintTimeline } from "./raster.js";
import { STATES, STATE_TEXT, clamp } from "./color.js";
import { nf, cut } from "./format.js";
import { onAxis } from "./texts.js";
import { Frame } from "./frame.js";
const STRIDES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
export class TimelineView {
  // app: { R (Run), th, sel, numRequests(), select(r), seek(step), say(text), dirty() }
  constructor(Plotly, host, app) {
    this.app = app;
    this.hov = null;
    this.follow = true;
    this.win = 60;
    this.f = new Frame(Plotly, host, {
      role: "timeline",
      label: "Timeline of requests by step",
      scroll: true,
      dirty: app.dirty,
      layout: () => {
        const h = this.home();
        const n = this.nrows();
        return {
          margin: { l: 62, b: 34 },
          xaxis: {
            range: h["xaxis.range"],
            title: { text: "step" },
            tickformat: ",d",
            minallowed: -20,
            nticks: 12,
          },
          yaxis: {
            range: h["yaxis.range"],
            tickcolor: "rgba(0,0,0,0)",
            minallowed: -0.5,
            maxallowed: n - 0.5,
            ...this.yticks(n, 150, -0.5, n - 0.5),
            showline: false,
            tickfont: { size: 10 },
          },
        };
      },
      home: () => {
        this.follow = true;
        this.win = 60;
        return this.home();
      },
      paint: (f, c, g) => this.paint(f, c, g),
      over: (f, x, g) => this.over(f, x, g),
      hover: (p) => this.hover(p),
      click: (p) => this.click(p),
      key: (e) => this.key(e),
      moved: (f) => {
        const g = f.geom();
        if (!this.setting) this.follow = this.app.R.step <= g.x1 + 1 && this.app.R.step >= g.x0;
        this.ticks();
      },
    });
  }
  // A row for each sequence that has come, and one for each request still to come.
  nrows() {
    const R = this.app.R;
    const come = R.root.filter((own, r) => own === r).length;
    return Math.max(8, R.ids.length + Math.max(0, this.app.numRequests() - come));
  }
  home() {
    const R = this.app.R;
    const s = R.steps;
    while (this.win < 480 && s > this.win - 3) this.win *= 2;
    const w = this.win;
    const x0 = R.step <= w ? 0 : Math.ceil((R.step - w) / (w / 4)) * (w / 4);
    return { "xaxis.range": [x0 + 0.5, x0 + w + 0.5], "yaxis.range": [this.nrows() - 0.5, -0.5] };
  }
  yticks(n, hpx, a, b) {
    const span = Math.max(1, b - a);
    const fit = Math.max(1, Math.floor(hpx / (10.5 * (this.app.th.scale || 1))));
    const d = STRIDES.find((k) => span / k <= fit) ?? STRIDES[STRIDES.length - 1];
    const v = [];
    for (
      let k = Math.max(0, Math.floor((a - span) / d) * d);
      k < Math.min(this.app.R.ids.length, b + span);
      k += d
    ) {
      v.push(k);
    }
    return { tickmode: "array", tickvals: v, ticktext: v.map((k) => onAxis(cut(this.app.R.id(k), 9))) };
  }
  ticks() {
    if (!this.f.ready) return;
    const g = this.f.geom();
    const t = this.yticks(this.app.R.ids.length, g.h, g.y0, g.y1);
    const key = `${t.tickvals[0]}:${t.tickvals[1]}:${t.tickvals.length}:${t.ticktext[t.ticktext.length - 1]}`;
    if (key === this.tkey) return;
    this.tkey = key;
    this.f.Plotly.relayout(this.f.gd, { "yaxis.tickvals": t.tickvals, "yaxis.ticktext": t.ticktext });
  }
  // After a message: keep the cursor in view (by quarters of the window, so that a relayout is rare) and the rows complete.
  advance() {
    this.f.du = true;
    if (!this.f.ready) return;
    const g = this.f.geom();
    const R = this.app.R;
    const n = this.nrows();
    const up = {};
    if (n !== this.n) {
      if (this.n === undefined || g.y1 >= this.n - 0.75) {
        up["yaxis.range"] = [n - 0.5, g.y0 <= 0 ? -0.5 : g.y0];
      }
      up["yaxis.maxallowed"] = n - 0.5;
      this.n = n;
    }
    if (this.follow && (R.step > g.x1 - 3 || R.step < g.x0)) {
      const w0 = this.win;
      const h = this.home()["xaxis.range"];
      if (this.win !== w0 || h[0] !== g.x0 || h[1] !== g.x1) up["xaxis.range"] = h;
    }
    if (Object.keys(up).length) {
      this.setting = true;
      Promise.resolve(this.f.setRange(up)).then(() => {
        this.setting = false;
        this.ticks();
      });
    } else if (this.nid !== R.ids.length) {
      this.ticks();
    }
    this.nid = R.ids.length;
  }
  paint(f, ctx, g) {
    const tl = this.app.R.tl;
    const lut = this.app.th.lut;
    const key = [g.x0, g.x1, g.y0, g.y1, g.W, g.H, g.dpr, tl.n].join();
    let c0 = 0;
    let c1 = g.W;
    this.full =
      f.fresh ||
      !(
        this.pkey === key &&
        this.ptl === tl &&
        this.plut === lut &&
        this.pt <= tl.t &&
        !this.app.noIncrement
      );
    if (!this.full) {
      const sx = g.W / (g.x1 - g.x0);
      c0 = Math.max(0, Math.floor((this.pt - 1.5 - g.x0) * sx) - 2);
      c1 = Math.min(g.W, Math.ceil((tl.t - 0.5 - g.x0) * sx) + 2);
    } // only the new steps
    this.pkey = key;
    this.ptl = tl;
    this.plut = lut;
    this.pt = tl.t;
    if (c1 <= c0) return;
    const w = c1 - c0;
    paintTimeline(f.px, g.W, g.H, tl, g, lut, g.dpr, c0, c1);
    ctx.putImageData(
      w === g.W ? f.img : new ImageData(new Uint8ClampedArray(f.px.buffer, 0, 4 * w * g.H), w, g.H),
      c0,
      0,
    );
  }
  over(f, x, g) {
    const { th, R, sel } = this.app;
    const X = (t) => g.l + (t - g.x0) * g.sx;
    const Y = (r) => g.t + (r - g.y0) * g.sy;
    x.save();
    x.beginPath();
    x.rect(g.l - 6, g.t, g.w + 6, g.h);
    x.clip();
    const now = X(R.step + 0.5);
    const end = X(R.steps + 0.5);
    if (end > now) {
      x.fillStyle = th.bg;
      x.globalAlpha = 0.62;
      x.fillRect(now, g.t, end - now, g.h);
      x.globalAlpha = 1;
    } // recorded, but later than the cursor
    if (sel >= 0) {
      const h = Math.max(4, g.sy);
      const y = Y(sel) - h / 2;
      x.lineJoin = "round";
      for (const [c, lw] of [
        [th.halo, 4],
        [th.accent, 2],
      ]) {
        x.strokeStyle = c;
        x.lineWidth = lw;
        x.strokeRect(g.l - 4, y, g.w + 8, h);
      }
    }
    if (now >= g.l - 1) {
      if (R.step > 0 && g.sx > 3) {
        x.fillStyle = th.accent;
        x.globalAlpha = 0.12;
        x.fillRect(X(R.step - 0.5), g.t, g.sx, g.h);
        x.globalAlpha = 1;
      }
      x.fillStyle = th.accent;
      x.fillRect(Math.round(now) - 0.75, g.t, 1.5, g.h);
      x.beginPath();
      x.moveTo(now - 5, g.t);
      x.lineTo(now + 5, g.t);
      x.lineTo(now, g.t + 6);
      x.fill();
    }
    if (this.hov) {
      const w = Math.max(5, g.sx);
      const h = Math.max(5, g.sy);
      const cx = X(this.hov.t) - w / 2;
      const cy = Y(this.hov.r) - h / 2;
      x.strokeStyle = th.halo;
      x.lineWidth = 3.5;
      x.strokeRect(cx, cy, w, h);
      x.strokeStyle = th.fg;
      x.lineWidth = 1.5;
      x.strokeRect(cx, cy, w, h);
    }
    x.restore();
  }
  describe(r, t) {
    const R = this.app.R;
    const c = R.tl.at(r, t);
    if (!c) return null;
    const q = R.info[r];
    return (
      `${R.name(r)} · step ${nf.format(t)}\n${STATE_TEXT[STATES[c.state]]}` +
      (c.state && c.end > c.start ? `, steps ${nf.format(c.start)}–${nf.format(c.end - 1)}` : "") +
      `\nprompt ${nf.format(q.np)}, at most ${nf.format(q.mt)} new tokens`
    );
  }
  // Many cells on one pixel: say so, with counts, instead of pretending that one cell is shown.
  digest(p) {
    const g = this.f.geom();
    const R = this.app.R;
    const tl = R.tl;
    if ((g.sy >= 0.75 && g.sx >= 0.75) || !tl.n) return null;
    const r0 = clamp(Math.floor(p.y - 0.5 / g.sy + 0.5), 0, tl.n - 1);
    const r1 = clamp(Math.ceil(p.y + 0.5 / g.sy - 0.5), r0, tl.n - 1);
    const a = Math.max(1, Math.floor(p.x - 0.5 / g.sx + 0.5));
    const b = Math.max(a + 1, Math.ceil(p.x + 0.5 / g.sx));
    const n = new Float64Array(32);
    for (let r = r0; r <= r1; r++) {
      const s = tl.rows[r];
      const L = tl.len[r];
      for (let i = Math.max(0, tl.find(r, a)); i < L; i++) {
        if (s[i] >>> 5 >= b) break;
        const u = Math.max(a, s[i] >>> 5);
        const v = Math.min(b, i + 1 < L ? s[i + 1] >>> 5 : tl.t);
        if (v > u) n[s[i] & 31] += v - u;
      }
    }
    const rows = r1 - r0 + 1;
    const all = rows * (b - a);
    const parts = [];
    for (let k = 1; k < STATES.length; k++) {
      if (n[k]) {
        parts.push(`${STATE_TEXT[STATES[k]]} ${((100 * n[k]) / all).toFixed(n[k] / all < 0.01 ? 2 : 0)}%`);
      }
    }
    return `${rows > 1 ? `${R.name(r0)}–${R.name(r1)} (${rows} requests)` : R.name(r0)} · steps ${nf.format(a)}–${nf.format(b - 1)}\n${parts.join(", ") || "nothing"}`;
  }
  hover(p) {
    const R = this.app.R;
    let h = null;
    if (p) {
      const r = Math.round(p.y);
      const t = Math.round(p.x);
      const txt = r >= 0 && r < R.ids.length ? this.digest(p) || this.describe(r, t) : null;
      if (txt) {
        this.f.showTip(p, txt);
        h = { r, t };
      } else {
        this.f.hideTip();
      }
    }
    if (!h !== !this.hov || (h && (h.r !== this.hov.r || h.t !== this.hov.t))) {
      this.hov = h;
      this.f.dov = true;
      this.app.dirty();
    }
  }
  click(p) {
    const R = this.app.R;
    const r = Math.round(p.y);
    const t = Math.round(p.x);
    if (r >= 0 && r < R.ids.length) this.app.select(r);
    if (t >= 1 && t <= R.steps) this.app.seek(t);
  }
  key(e) {
    // left and right are the page's own: one step back, one on
    const R = this.app.R;
    const d = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[e.key];
    if (d === undefined || !R.ids.length) return false;
    const r = clamp(this.app.sel < 0 ? 0 : this.app.sel + d, 0, R.ids.length - 1);
    this.app.select(r);
    this.app.say((this.describe(r, R.step) || R.id(r)).replace(/\n/g, ", "));
    return true;
  }
  summary() {
    const R = this.app.R;
    const n = new Map();
    for (const q of R.rows) if (q) n.set(q.code, (n.get(q.code) || 0) + 1);
    return (
      `Timeline, ${R.ids.length} requests, ${nf.format(R.steps)} steps. At step ${R.step}: ` +
      ([...n].map(([c, k]) => `${k} ${STATE_TEXT[STATES[c]]}`).join(", ") || "nothing has arrived") +
      "."
    );
  }
}
