// Draws the axes and lines of a `Frame` as SVG. Stands in for plotly.js (1.5 MB packed) where a page must stay small: the player that a notebook keeps.
// It knows what our figures use, no more: linear and log axes, ticks, titles, lines and markers, a second y axis, pan, zoom.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const SI = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];
const CHAR_PX = 0.58; // width of an average letter, in heights
const ENTITY = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&#36;": "$" };
const PATHS = {
  circle: (r) => `m${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  diamond: (r) => `m0,${-1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
  square: (r) => `m${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
};

function svg(tag, attrs, text) {
  const e = document.createElementNS(SVG_SPACE, tag);
  for (const k in attrs) if (attrs[k] !== undefined) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  return e;
}

/** The step between ticks: 1, 2 or 5 times a power of ten, so that at most `most` ticks fit. */
export function niceStep(span, most) {
  const rough = Math.max(span / Math.max(1, most), Number.MIN_VALUE);
  const ten = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((k) => k * ten).find((d) => d >= rough * (1 - 1e-9));
}

/** A tick's label in the few formats that our figures name. */
export function tickText(v, format) {
  if (format === "~s") {
    const [unit, sign] = SI.find(([u]) => Math.abs(v) >= u) || [1, ""];
    return `${+(v / unit).toPrecision(3)}${sign}`;
  }
  if (format === "d") return String(Math.round(v));
  return (+v.toPrecision(6)).toLocaleString("en-US");
}

class Axis {
  constructor(spec) {
    this.spec = spec;
    this.log = spec.type === "log";
    this.range = (spec.range || [0, 1]).slice();
  }
  /** From pixel 0 at the left (x) or at the top (y), over `length` pixels. */
  place(length, vertical) {
    this.length = length;
    this.vertical = vertical;
  }
  d2p(v) {
    const [a, b] = this.range;
    const share = ((this.log ? Math.log10(v) : v) - a) / (b - a);
    return (this.vertical ? 1 - share : share) * this.length;
  }
  p2d(p) {
    const [a, b] = this.range;
    const share = p / this.length;
    const v = a + (this.vertical ? 1 - share : share) * (b - a);
    return this.log ? 10 ** v : v;
  }
  /** [value, label] of each tick on screen. */
  ticks() {
    const { spec, log } = this;
    const [lo, hi] = [Math.min(...this.range), Math.max(...this.range)];
    if (spec.tickmode === "array") {
      return spec.tickvals
        .map((v, i) => [v, String(spec.ticktext[i]).replace(/&(amp|lt|gt|#36);/g, (e) => ENTITY[e])])
        .filter(([v]) => v >= lo && v <= hi);
    }
    const most = Math.min(spec.nticks || 8, this.length / (this.vertical ? 22 : 46));
    const least = log || spec.tickformat === ",d" ? 1 : 0;
    const d = Math.max(least, spec.dtick && !log ? spec.dtick : niceStep(hi - lo, most));
    const start = spec.tick0 || 0;
    const out = [];
    for (
      let k = Math.ceil((lo - start) / d - 1e-9);
      start + k * d <= hi + 1e-9 * d && out.length < 200;
      k++
    ) {
      const v = log ? 10 ** (start + k * d) : start + k * d;
      out.push([v, (spec.tickprefix || "") + tickText(v, spec.tickformat) + (spec.ticksuffix || "")]);
    }
    return out;
  }
  /** Moves the range into what the figure allows, at the same width. */
  keepInside() {
    const { minallowed: least, maxallowed: most } = this.spec;
    const r = this.range;
    const up = r[1] > r[0];
    let lo = Math.min(...r);
    let hi = Math.max(...r);
    if (least !== undefined && lo < least) [lo, hi] = [least, Math.min(most ?? Infinity, hi + least - lo)];
    if (most !== undefined && hi > most) [lo, hi] = [Math.max(least ?? -Infinity, lo - (hi - most)), most];
    this.range = up ? [lo, hi] : [hi, lo];
  }
}

class Figure {
  constructor(gd, data, layout, config) {
    Object.assign(this, { gd, layout, config, listeners: {} });
    gd.data = data;
    gd.on = (event, f) => (this.listeners[event] ||= []).push(f);
    this.node = svg("svg", { style: "position:absolute;inset:0;width:100%;height:100%;display:block" });
    gd.replaceChildren(this.node);
    this.mouse();
    this.draw();
  }
  emit(event) {
    for (const f of this.listeners[event] || []) f();
  }
  /** Sets `xaxis.range` and the like. */
  change(updates) {
    for (const [path, value] of Object.entries(updates)) {
      const [axis, name] = path.split(".");
      this.layout[axis] = { ...this.layout[axis], [name]: value };
    }
    this.draw();
  }
  draw() {
    const { gd, layout } = this;
    const m = layout.margin;
    const w = Math.max(1, gd.clientWidth - m.l - m.r);
    const h = Math.max(1, gd.clientHeight - m.t - m.b);
    const x = new Axis(layout.xaxis);
    const y = new Axis(layout.yaxis);
    const y2 = layout.yaxis2 && new Axis(layout.yaxis2);
    x.place(w, false);
    for (const [axis, name] of [
      [y, "y"],
      [y2, "y2"],
    ]) {
      if (axis) {
        axis.place(h, true);
        if (axis.spec.autorange) axis.range = this.extent(name);
      }
    }
    if (layout.yaxis.scaleanchor) this.square(x, y);
    gd._fullLayout = { _size: { l: m.l, t: m.t, w, h }, xaxis: x, yaxis: y };
    const body = svg("g", { transform: `translate(${m.l},${m.t})` });
    this.lines(body, x, layout.xaxis, h);
    this.lines(body, y, layout.yaxis, w);
    if (y2) this.lines(body, y2, layout.yaxis2, w, w);
    const clip = svg("svg", { x: 0, y: 0, width: w, height: h, overflow: "hidden" });
    for (const t of gd.data) this.trace(clip, t, x, t.yaxis === "y2" && y2 ? y2 : y);
    body.append(clip);
    this.node.replaceChildren(body);
    this.emit("plotly_afterplot");
  }
  /** From zero to a little over the largest value of the lines on this axis. */
  extent(name) {
    let most = 0;
    for (const t of this.gd.data) {
      if ((t.yaxis || "y") === name) for (const v of t.y) if (v > most && isFinite(v)) most = v;
    }
    return [0, most ? most * 1.06 : 1];
  }
  /** As many pixels a unit on both axes: the axis with more room shows more. */
  square(x, y) {
    const sx = x.length / Math.abs(x.range[1] - x.range[0]);
    const sy = y.length / Math.abs(y.range[1] - y.range[0]);
    const [axis, scale] = sx > sy ? [x, sy] : [y, sx];
    const [a, b] = axis.range;
    const half = ((axis.length / scale) * Math.sign(b - a)) / 2;
    axis.range = [(a + b) / 2 - half, (a + b) / 2 + half];
  }
  /** The line, ticks, labels, grid and title of an axis; `across` is the plot's other side, `at` its place on the right. */
  lines(body, axis, spec, across, at) {
    const { font } = this.layout;
    const v = axis.vertical;
    const n = axis.length;
    const size = spec.tickfont?.size || font.size;
    const color = spec.color || font.color;
    const side = v ? (at ?? 0) : across;
    const out = v && at === undefined ? -1 : 1;
    const len = spec.ticks === "" ? 0 : spec.ticklen || 0;
    const add = (attrs) => body.append(svg("path", { fill: "none", ...attrs }));
    if (spec.showline) add({ d: v ? `M${side},0V${n}` : `M0,${side}H${n}`, stroke: spec.linecolor });
    for (const [value, text] of axis.ticks()) {
      const p = axis.d2p(value);
      if (!(p >= -1 && p <= n + 1)) continue;
      if (spec.showgrid) add({ d: v ? `M0,${p}H${across}` : `M${p},0V${across}`, stroke: spec.gridcolor });
      if (len) add({ d: v ? `M${side},${p}h${out * len}` : `M${p},${side}v${len}`, stroke: spec.tickcolor });
      const place = v
        ? { x: side + out * (len + 3), y: p + size * 0.35, "text-anchor": out < 0 ? "end" : "start" }
        : { x: p, y: side + len + size, "text-anchor": "middle" };
      body.append(
        svg("text", { ...place, fill: color, "font-size": size, "font-family": font.family }, text),
      );
    }
    const title = spec.title?.text;
    if (!title) return;
    const high = spec.title.font?.size || font.size;
    const place = v
      ? {
          transform: `translate(${side + out * ((at === undefined ? this.layout.margin.l : this.layout.margin.r) - high * 0.5)},${n / 2}) rotate(-90)`,
        }
      : { x: n / 2, y: side + this.layout.margin.b - high * 0.35 };
    body.append(
      svg(
        "text",
        {
          ...place,
          "text-anchor": "middle",
          fill: spec.title.font?.color || color,
          "font-size": Math.min(high, n / (title.length * CHAR_PX)),
          "font-family": font.family,
        },
        title,
      ),
    );
  }
  trace(clip, t, x, y) {
    const points = [];
    for (let i = 0; i < t.x.length; i++) {
      const ok = t.x[i] !== null && t.y[i] !== null && isFinite(t.y[i]);
      points.push(ok ? [x.d2p(t.x[i]), y.d2p(t.y[i])] : null);
    }
    if (t.mode === "lines") {
      let d = "";
      let on = false;
      for (const p of points) {
        if (p) d += `${on ? "L" : "M"}${p[0].toFixed(1)},${p[1].toFixed(1)}`;
        on = !!p;
      }
      const { color, width, dash } = t.line;
      const dashes = { dot: `${width},${2 * width}`, dash: `${4 * width},${3 * width}` }[dash];
      if (d) {
        clip.append(
          svg("path", { d, fill: "none", stroke: color, "stroke-width": width, "stroke-dasharray": dashes }),
        );
      }
      return;
    }
    const { size, symbol, color, opacity } = t.marker;
    if (!opacity || !size) return;
    const shape = (PATHS[symbol] || PATHS.circle)(size / 2);
    const d = points.flatMap((p) => (p ? [`M${p[0].toFixed(1)},${p[1].toFixed(1)}${shape}`] : [])).join("");
    if (d) clip.append(svg("path", { d, fill: color, opacity }));
  }
  /** Drag moves, the wheel zooms around the mouse, a double click is told; an axis with `fixedrange` stays. */
  mouse() {
    const { gd } = this;
    const free = () => ["xaxis", "yaxis"].filter((k) => !this.layout[k].fixedrange);
    let from = null;
    const set = (ranges, done) => {
      for (const k of free()) {
        const axis = new Axis({ ...this.layout[k], range: ranges[k] });
        axis.keepInside();
        this.layout[k] = { ...this.layout[k], range: axis.range };
      }
      this.draw();
      this.emit(done ? "plotly_relayout" : "plotly_relayouting");
    };
    gd.addEventListener("pointerdown", (e) => {
      if (e.button || !free().length) return;
      const { xaxis, yaxis } = gd._fullLayout;
      from = {
        x: e.clientX,
        y: e.clientY,
        xaxis: xaxis.range.slice(),
        yaxis: yaxis.range.slice(),
        moved: false,
      };
    });
    gd.addEventListener("pointermove", (e) => {
      if (!from || !(e.buttons & 1)) return;
      const dx = e.clientX - from.x;
      const dy = e.clientY - from.y;
      if (!from.moved && Math.hypot(dx, dy) < 4) return;
      if (!from.moved) gd.setPointerCapture(e.pointerId);
      from.moved = true;
      const { xaxis, yaxis } = gd._fullLayout;
      const mx = (-dx / xaxis.length) * (from.xaxis[1] - from.xaxis[0]);
      const my = (dy / yaxis.length) * (from.yaxis[1] - from.yaxis[0]);
      set({ xaxis: from.xaxis.map((v) => v + mx), yaxis: from.yaxis.map((v) => v + my) }, false);
    });
    const end = () => {
      if (from && from.moved) this.emit("plotly_relayout");
      from = null;
    };
    gd.addEventListener("pointerup", end);
    gd.addEventListener("pointercancel", end);
    gd.addEventListener("dblclick", () => this.emit("plotly_doubleclick"));
    gd.addEventListener(
      "wheel",
      (e) => {
        if (!this.config.scrollZoom || !free().length) return;
        e.preventDefault();
        const { xaxis, yaxis, _size } = gd._fullLayout;
        const box = gd.getBoundingClientRect();
        const k = Math.exp(Math.max(-100, Math.min(100, e.deltaY)) / 500);
        const around = (axis, p) => {
          const v = axis.p2d(p);
          return axis.range.map((r) => v + (r - v) * k);
        };
        set(
          {
            xaxis: around(xaxis, e.clientX - box.left - _size.l),
            yaxis: around(yaxis, e.clientY - box.top - _size.t),
          },
          true,
        );
      },
      { passive: false },
    );
  }
}

const figures = new WeakMap();
const put = (gd, columns, only = gd.data.keys()) => {
  let k = 0;
  for (const i of only) {
    for (const name in columns) gd.data[i][name] = columns[name][k];
    k++;
  }
};

/** The part of plotly's interface that our figures call. */
export const Axes = {
  async newPlot(gd, data, layout, config) {
    figures.set(gd, new Figure(gd, data, layout, config));
  },
  async react(gd, data, layout) {
    const f = figures.get(gd);
    gd.data = data;
    f.layout = layout;
    f.draw();
  },
  async relayout(gd, updates) {
    const f = figures.get(gd);
    if (!f) return;
    f.change(updates);
    f.emit("plotly_relayout");
  },
  async restyle(gd, columns) {
    put(gd, columns);
    figures.get(gd)?.draw();
  },
  async update(gd, columns, updates) {
    put(gd, columns);
    figures.get(gd)?.change(updates);
  },
  async extendTraces(gd, columns, indices, most) {
    indices.forEach((i, k) => {
      for (const name in columns) gd.data[i][name] = [...gd.data[i][name], ...columns[name][k]].slice(-most);
    });
    figures.get(gd)?.draw();
  },
  purge(gd) {
    figures.delete(gd);
    gd.replaceChildren();
  },
  Plots: {
    resize(gd) {
      figures.get(gd)?.draw();
    },
  },
};
