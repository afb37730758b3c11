// A transparent Plotly figure that owns axes, zoom and pan, exactly over a canvas ("under") and below another one ("over").
export const el = (tag, css, attrs = {}) => {
  const e = document.createElement(tag);
  if (css) e.style.cssText = css;
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  return e;
};
const PLOTLY = {
  displaylogo: false,
  displayModeBar: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  showTips: false,
  doubleClick: false,
  responsive: false,
};
export class Frame {
  // o: { role, label, scroll, traces(th), layout(th), paint(frame, ctx, geom), over(frame, ctx, geom), hover(pt | null), click(pt), key(ev) -> bool, home() -> ranges, moved(frame), resized(frame), dirty() }
  constructor(Plotly, host, o) {
    Object.assign(this, { Plotly, o, dead: false, du: true, dov: true, painted: 0, reg: [] });
    this.root = el("div", "position:absolute;inset:0;outline-offset:-2px", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": o.role,
      "aria-label": o.label,
      "data-lm-suppress-shortcuts": "true",
      class: "cb-frame",
    });
    this.under = el("canvas", "position:absolute;image-rendering:pixelated", {
      role: "img",
      "aria-label": o.label,
    });
    this.gd = el("div", "position:absolute;inset:0");
    this.over = el("canvas", "position:absolute;left:0;top:0;pointer-events:none", { "aria-hidden": "true" });
    this.tip = el("div", "", { "aria-hidden": "true", class: "cb-tip" });
    this.root.append(this.under, this.gd, this.over, this.tip);
    host.append(this.root);
    this.uctx = this.under.getContext("2d");
    this.octx = this.over.getContext("2d");
  }
  layout(th) {
    const ax = {
      showgrid: false,
      zeroline: false,
      ticks: "outside",
      ticklen: 3,
      tickcolor: th.line,
      linecolor: th.line,
      showline: true,
      color: th.mute,
      title: { font: { size: 11, color: th.mute }, standoff: 4 },
    };
    const l = this.o.layout(th);
    const k = th.scale || 1;
    const large = (o) => (o && o.size ? { ...o, size: o.size * k } : o);
    const margin = { l: 58, r: 10, t: 4, b: 32, ...l.margin };
    for (const s in margin) margin[s] *= k;
    const m = (a, b) => {
      const v = { ...a, ...b };
      const t = { ...a.title, ...b.title };
      return {
        ...v,
        ...(v.tickfont ? { tickfont: large(v.tickfont) } : {}),
        title: { ...t, font: large(t.font) },
      };
    };
    return {
      ...l,
      autosize: true,
      margin,
      plot_bgcolor: "rgba(0,0,0,0)",
      paper_bgcolor: "rgba(0,0,0,0)",
      font: { family: th.font, size: 11 * k, color: th.mute },
      showlegend: false,
      hovermode: false,
      dragmode: "pan",
      uirevision: "keep",
      xaxis: m(ax, l.xaxis),
      yaxis: m(ax, l.yaxis),
    };
  }
  async init(th) {
    this.th = th;
    const traces = this.o.traces
      ? this.o.traces(th)
      : [
          {
            type: "scatter",
            mode: "markers",
            x: [null],
            y: [null],
            marker: { opacity: 0 },
            hoverinfo: "none",
          },
        ];
    await this.Plotly.newPlot(this.gd, traces, this.layout(th), { ...PLOTLY, scrollZoom: !!this.o.scroll });
    if (this.dead) return;
    const on = (t, ev, f, opt) => {
      t.addEventListener(ev, f, opt);
      this.reg.push(() => t.removeEventListener(ev, f, opt));
    };
    const mark = () => {
      this.du = this.dov = true;
      this.o.dirty();
    };
    this.gd.on("plotly_relayouting", () => {
      mark();
      this.hideTip();
    });
    this.gd.on("plotly_relayout", () => {
      mark();
      if (this.o.moved) this.o.moved(this);
    });
    this.gd.on("plotly_afterplot", mark);
    this.gd.on("plotly_doubleclick", () => this.fit());
    // Hover and click are our own, from the mouse position (a drag makes Plotly put a cover over the page, so a click is told from down and up).
    let down = null;
    on(this.gd, "mousemove", (e) => {
      if (!e.buttons && this.o.hover) this.o.hover(this.pick(e));
    });
    on(this.gd, "mouseleave", () => {
      this.hideTip();
      if (this.o.hover) this.o.hover(null);
    });
    on(
      this.gd,
      "mousedown",
      (e) => {
        down = { x: e.clientX, y: e.clientY, t: e.timeStamp };
      },
      true,
    );
    on(
      window,
      "mouseup",
      (e) => {
        if (
          down &&
          Math.hypot(e.clientX - down.x, e.clientY - down.y) < 4 &&
          e.timeStamp - down.t < 600 &&
          e.detail < 2
        ) {
          const p = this.pick(e);
          if (p && this.o.click) this.o.click(p);
        }
        down = null;
      },
      true,
    );
    on(this.root, "keydown", (e) => {
      if (e.target === this.root && this.o.key && this.root.matches(":focus-visible") && this.o.key(e)) {
        e.preventDefault();
        e.stopPropagation();
      }
    });
    on(this.root, "focus", () => {
      this.dov = true;
      this.o.dirty();
    });
    on(this.root, "blur", () => {
      this.dov = true;
      this.o.dirty();
    });
    this.cw = this.gd.clientWidth;
    this.ch = this.gd.clientHeight; // remembered: reading them in a frame would force a layout
    this.ro = new ResizeObserver(() => {
      this.cw = this.gd.clientWidth;
      this.ch = this.gd.clientHeight;
      if (this.dead || !this.cw) return;
      clearTimeout(this.rt);
      this.rt = setTimeout(() => {
        if (this.dead) return;
        if (this.o.resized) this.o.resized(this);
        this.Plotly.Plots.resize(this.gd);
      }, 30);
    });
    this.ro.observe(this.root);
    const watch = () => {
      this.mq = matchMedia(`(resolution: ${devicePixelRatio}dppx)`);
      this.mq.addEventListener(
        "change",
        () => {
          if (!this.dead) {
            mark();
            watch();
          }
        },
        { once: true },
      );
    };
    watch();
    mark();
  }
  get ready() {
    return !this.dead && !!(this.gd._fullLayout && this.gd._fullLayout._size);
  }
  pick(e) {
    const r = this.gd.getBoundingClientRect();
    const fl = this.gd._fullLayout;
    const s = fl._size;
    const px = (e.clientX - r.left) * (this.gd.clientWidth / r.width) - s.l;
    const py = (e.clientY - r.top) * (this.gd.clientHeight / r.height) - s.t;
    if (px < 0 || py < 0 || px > s.w || py > s.h) return null;
    return { x: fl.xaxis.p2d(px), y: fl.yaxis.p2d(py), px: px + s.l, py: py + s.t };
  }
  // Integers of device pixels, so that the canvas is never blurred and lies exactly under the plot area.
  geom() {
    const fl = this.gd._fullLayout;
    const s = fl._size;
    const dpr = window.devicePixelRatio || 1;
    const X = Math.round(s.l * dpr);
    const Y = Math.round(s.t * dpr);
    const W = Math.max(1, Math.round((s.l + s.w) * dpr) - X);
    const H = Math.max(1, Math.round((s.t + s.h) * dpr) - Y);
    const x = fl.xaxis.range;
    const y = fl.yaxis.range;
    return {
      dpr,
      X,
      Y,
      W,
      H,
      l: s.l,
      t: s.t,
      w: s.w,
      h: s.h,
      cw: this.cw,
      ch: this.ch,
      x0: +x[0],
      x1: +x[1],
      y0: +y[1],
      y1: +y[0],
      sx: s.w / (x[1] - x[0]),
      sy: s.h / (y[0] - y[1]),
    };
  }
  flush() {
    // called from the page's single requestAnimationFrame; true if something was painted
    if (!this.ready || !(this.du || this.dov) || !this.cw) return false;
    const g = this.geom();
    if (this.du) {
      if (this.o.paint) {
        const c = this.under;
        if (c.width !== g.W || c.height !== g.H) {
          c.width = g.W;
          c.height = g.H;
          this.img = null;
        }
        const css = `${g.X / g.dpr},${g.Y / g.dpr},${g.W / g.dpr},${g.H / g.dpr}`;
        if (this.css !== css) {
          this.css = css;
          c.style.left = g.X / g.dpr + "px";
          c.style.top = g.Y / g.dpr + "px";
          c.style.width = g.W / g.dpr + "px";
          c.style.height = g.H / g.dpr + "px";
        }
        if (!this.img) {
          this.img = new ImageData(g.W, g.H);
          this.px = new Uint32Array(this.img.data.buffer);
          this.fresh = true;
        }
        this.o.paint(this, this.uctx, g);
        this.fresh = false;
      }
      this.du = false;
      this.painted++;
      this.dov = true;
    }
    if (this.dov) {
      const c = this.over;
      const W = Math.round(g.cw * g.dpr);
      const H = Math.round(g.ch * g.dpr);
      const x = this.octx;
      if (c.width !== W || c.height !== H) {
        c.width = W;
        c.height = H;
        c.style.width = W / g.dpr + "px";
        c.style.height = H / g.dpr + "px";
      } else {
        x.clearRect(0, 0, W, H);
      }
      x.save();
      x.scale(g.dpr, g.dpr);
      this.o.over(this, x, g);
      x.restore();
      this.dov = false;
    }
    return true;
  }
  setRange(r) {
    return this.Plotly.relayout(this.gd, r);
  }
  fit() {
    if (!this.o.home) return;
    this.setRange(this.o.home());
    if (this.o.moved) this.o.moved(this);
  }
  async retheme(th) {
    this.th = th;
    if (!this.ready) return;
    const L = this.layout(th);
    const fl = this.gd._fullLayout;
    L.xaxis.range = fl.xaxis.range.slice();
    if (!L.yaxis.autorange) L.yaxis.range = fl.yaxis.range.slice();
    if (this.o.restyle) this.o.restyle(this.gd.data, th);
    await this.Plotly.react(this.gd, this.gd.data, L);
    this.du = this.dov = true;
    this.fresh = true;
    this.o.dirty();
  }
  showTip(p, text) {
    const t = this.tip;
    if (t.textContent !== text) t.textContent = text;
    t.style.display = "block";
    t.style.background = this.th.tip;
    t.style.color = this.th.tipfg;
    const right = p.px > this.gd.clientWidth * 0.55;
    const low = p.py > this.gd.clientHeight * 0.55;
    t.style.transform = `translate(${right ? "-100%" : "0"},${low ? "-100%" : "0"})`;
    t.style.left = p.px + (right ? -12 : 12) + "px";
    t.style.top = p.py + (low ? -10 : 12) + "px";
  }
  hideTip() {
    this.tip.style.display = "none";
  }
  destroy() {
    this.dead = true;
    clearTimeout(this.rt);
    this.reg.forEach((f) => f());
    if (this.ro) this.ro.disconnect();
    this.Plotly.purge(this.gd);
    this.root.remove();
  }
}
