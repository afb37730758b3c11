// The pool, physical: one cell a block, coloured by owner. Shared, cached, free and just-changed blocks differ in shape, not only in colour.
import { clamp } from "./color.js";
import { paintBlocks } from "./raster.js";
import { NULLBLOCK, CACHED } from "./store.js";
import { shortId, plural } from "./format.js";
import { Frame } from "./frame.js";
// Columns: a multiple of 8 where the pool has that many, so that the largest cells fit in w x h.
export function gridCols(n, w, h) {
  const size = (c) => Math.min(w / c, h / Math.ceil(n / c));
  let best = Math.min(n, 8);
  if (n <= 8) {
    for (let c = 1; c <= n; c++) if (size(c) > size(best) + 1e-9) best = c;
    return best;
  }
  for (let c = 8; c < n + 8; c += 8) if (size(c) > size(best) + 1e-9) best = c;
  return best;
}
export class BlockView {
  constructor(Plotly, host, app) {
    this.app = app;
    this.cur = -1;
    this.hov = -1;
    this.fit(host.clientWidth, host.clientHeight);
    this.f = new Frame(Plotly, host, {
      role: "block map",
      label: "Map of KV blocks",
      scroll: true,
      dirty: app.dirty,
      layout: () => this.axes(),
      home: () => this.home(),
      paint: (f, c, g) => this.paint(f, c, g),
      over: (f, x, g) => this.over(f, x, g),
      hover: (p) => this.hover(p),
      click: (p) => this.click(p),
      key: (e) => this.key(e),
      resized: (f) => {
        const c = this.cols;
        this.fit(f.root.clientWidth, f.root.clientHeight);
        if (c !== this.cols) {
          this.pkey = null;
          f.Plotly.relayout(f.gd, this.axesUpdate());
        }
      },
    });
  }
  get k() {
    return this.app.th.scale || 1;
  }
  fit(w, h) {
    this.h = h || 240;
    this.cols = gridCols(
      this.app.R.bl.n,
      Math.max(80, (w || 400) - 52 * this.k),
      Math.max(60, this.h - 32 * this.k),
    );
    this.rows = Math.ceil(this.app.R.bl.n / this.cols);
  }
  ticksY() {
    let d = 1;
    while ((this.rows / d) * 14 * this.k > this.h - 32 * this.k) d *= 2;
    const v = [];
    for (let r = 0; r < this.rows; r += d) v.push(r);
    return { tickmode: "array", tickvals: v, ticktext: v.map((r) => String(r * this.cols)) };
  }
  dtick() {
    let d = 8;
    while (this.cols / d > 12) d *= 2;
    return this.cols < 8 ? 1 : d;
  }
  axes() {
    const h = this.home();
    return {
      margin: { l: 42, r: 8, t: 4, b: 22 },
      xaxis: {
        range: h["xaxis.range"],
        showline: false,
        ticks: "",
        tick0: 0,
        dtick: this.dtick(),
        tickformat: "d",
        tickprefix: "+",
        title: { text: "" },
      },
      yaxis: {
        range: h["yaxis.range"],
        ...this.ticksY(),
        ticks: "",
        showline: false,
        scaleanchor: "x",
        scaleratio: 1,
      },
    };
  }
  axesUpdate() {
    const t = this.ticksY();
    return {
      ...this.home(),
      "xaxis.dtick": this.dtick(),
      "yaxis.tickvals": t.tickvals,
      "yaxis.ticktext": t.ticktext,
    };
  }
  home() {
    return { "xaxis.range": [-0.5, this.cols - 0.5], "yaxis.range": [this.rows - 0.5, -0.5] };
  }
  at(p) {
    const x = Math.round(p.x);
    const y = Math.round(p.y);
    if (x < 0 || x >= this.cols || y < 0) return -1;
    const i = y * this.cols + x;
    return i < this.app.R.bl.n ? i : -1;
  }
  frags() {
    const { R } = this.app;
    const q = R.waiting.length ? R.rows[R.waiting[0]] : null;
    return !!q && q.wait === "fragments";
  } // the head of the queue waits though enough blocks are free
  run(i) {
    const bl = this.app.R.bl;
    let a = i;
    let b = i;
    while (a > 1 && !bl.refs(a - 1)) a--;
    while (b + 1 < bl.n && !bl.refs(b + 1)) b++;
    return b - a + 1;
  }
  picked() {
    const { sel, R } = this.app;
    const q = sel >= 0 ? R.rows[sel] : null;
    return q ? new Set(q.blocks) : null;
  }
  paint(f, ctx, g) {
    const { th, R } = this.app;
    const { W, H, dpr } = g;
    const cell = Math.min(W / (g.x1 - g.x0), H / (g.y1 - g.y0)) / dpr;
    const bl = R.bl;
    const vis = Math.max(1, g.x1 - g.x0) * Math.max(1, g.y1 - g.y0);
    const frag = this.frags();
    if (frag !== this.frag) {
      this.frag = frag;
      bl.dirty = null;
    }
    this.mk = this.picked();
    if (this.mk) this.mk.delete(0);
    if (cell < 9 || vis > 6000) {
      let dim = null;
      if (this.mk && this.mk.size) {
        dim =
          this.dimA && this.dimA.length === bl.n
            ? this.dimA.fill(1)
            : (this.dimA = new Uint8Array(bl.n).fill(1));
        for (const i of this.mk) dim[i] = 0;
      }
      paintBlocks(f.px, W, H, bl, this.cols, g, th.own, th, dpr, dim);
      ctx.putImageData(f.img, 0, 0);
      this.pkey = null;
      return;
    }
    const key = [g.x0, g.x1, g.y0, g.y1, W, H, dpr, this.mk ? [...this.mk].join(".") : ""].join();
    const inc =
      !f.fresh &&
      this.pkey === key &&
      this.pth === th &&
      this.pbl === bl &&
      bl.dirty &&
      !this.app.noIncrement;
    this.pkey = key;
    this.pth = th;
    this.pbl = bl;
    const sx = W / (g.x1 - g.x0);
    const sy = H / (g.y1 - g.y0);
    const k = {
      g,
      sx,
      sy,
      cell,
      gap: Math.max(1, Math.round(cell * 0.07 * dpr)),
      rad: Math.round(Math.min(5, cell * 0.14) * dpr),
      fs: Math.min(14, Math.max(9, cell * 0.42)) * dpr,
      text: cell >= 14,
      lw: Math.max(1, Math.round(cell / 18)) * dpr,
      dim: this.mk && this.mk.size > 0,
    };
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.font = this.font = `600 ${k.fs}px ${th.font}`;
    if (inc) {
      for (const i of bl.dirty) this.cell(ctx, i, k, true);
      bl.dirty.clear();
      return;
    } // only the blocks that changed
    ctx.clearRect(0, 0, W, H);
    bl.dirty = new Set();
    const c0 = clamp(Math.floor(g.x0 + 0.5), 0, this.cols - 1);
    const c1 = clamp(Math.ceil(g.x1), 0, this.cols - 1);
    const r0 = clamp(Math.floor(g.y0 + 0.5), 0, this.rows - 1);
    const r1 = clamp(Math.ceil(g.y1), 0, this.rows - 1);
    for (let r = r0; r <= r1; r++) {
      for (let c = c0; c <= c1; c++) {
        const i = r * this.cols + c;
        if (i >= bl.n) break;
        this.cell(ctx, i, k, false);
      }
    }
  }
  cell(ctx, i, { g, sx, sy, cell, gap, rad, fs, text, lw, dim }, clear) {
    const { th, R } = this.app;
    const bl = R.bl;
    const dpr = g.dpr;
    const refs = bl.refs(i);
    const own = bl.owner(i);
    const flags = bl.flags(i);
    const k = own & 255;
    const c = i % this.cols;
    const r = (i - c) / this.cols;
    const xa = Math.round((c - 0.5 - g.x0) * sx);
    const xb = Math.round((c + 0.5 - g.x0) * sx) - gap;
    const ya = Math.round((r - 0.5 - g.y0) * sy);
    const yb = Math.round((r + 0.5 - g.y0) * sy) - gap;
    const w = xb - xa;
    const h = yb - ya;
    const off = dim && !this.mk.has(i);
    if (xb < 0 || yb < 0 || xa > g.W || ya > g.H) return;
    if (clear) ctx.clearRect(xa - 1, ya - 1, w + 2, h + 2); // 1 px more: anti-aliasing may bleed into the gap
    const box = (x, y, w, h, r) => {
      ctx.beginPath();
      ctx.roundRect(x, y, w, h, r);
    };
    if (flags & NULLBLOCK) {
      ctx.fillStyle = th.free;
      box(xa, ya, w, h, rad);
      ctx.fill();
      ctx.strokeStyle = th.mute;
      ctx.lineWidth = Math.max(1, dpr);
      ctx.beginPath();
      ctx.moveTo(xa + 0.22 * w, yb - 0.22 * h);
      ctx.lineTo(xb - 0.22 * w, ya + 0.22 * h);
      ctx.stroke();
    } else if (refs) {
      const fill = bl.fill(i);
      const full = fill >= bl.size;
      ctx.globalAlpha = off ? 0.28 : 1;
      ctx.fillStyle = full ? th.own.css[k] : th.own.tint[k];
      box(xa, ya, w, h, rad);
      ctx.fill();
      if (!full && fill) {
        const fh = Math.max(1, Math.round((h * fill) / bl.size));
        const top = fh > h - rad ? rad : 0;
        ctx.fillStyle = th.own.css[k];
        box(xa, yb - fh, w, fh, fh < rad ? [0, 0, fh, fh] : [top, top, rad, rad]);
        ctx.fill();
      }
      if (refs > 1) {
        ctx.strokeStyle = full && cell >= 22 ? th.own.ink[k] : th.fg;
        ctx.lineWidth = Math.max(lw, 1.5 * dpr);
        const m = cell < 22 ? 0.75 * dpr : Math.max(2 * dpr, cell * 0.1 * dpr);
        box(xa + m, ya + m, w - 2 * m, h - 2 * m, Math.max(0, Math.round(rad - m / 2)));
        ctx.stroke();
      } // shared: inner ring
      if (text) {
        ctx.fillStyle = full && !off ? th.own.ink[k] : th.fg;
        if (off) ctx.globalAlpha = 0.5;
        const s = shortId(R.id(own));
        if (refs > 1 && cell >= 26) {
          ctx.fillText(s, xa + w / 2, ya + h * 0.43, w * 0.7);
          ctx.font = `600 ${fs * 0.62}px ${th.font}`;
          ctx.fillText("×" + refs, xa + w / 2, ya + h * 0.73, w * 0.7);
          ctx.font = this.font;
        } else {
          ctx.fillText(s, xa + w / 2, ya + h / 2 + fs * 0.04, w * 0.86);
        }
      }
    } else {
      // free; cached but free: dots in the last owner's colour
      ctx.globalAlpha = off ? 0.5 : 1;
      ctx.fillStyle = th.free;
      box(xa, ya, w, h, rad);
      ctx.fill();
      if (this.frag) {
        ctx.strokeStyle = th.bad;
        ctx.lineWidth = Math.max(1, dpr);
        ctx.beginPath();
        ctx.moveTo(xa + 0.32 * w, ya + 0.32 * h);
        ctx.lineTo(xb - 0.32 * w, yb - 0.32 * h);
        ctx.moveTo(xb - 0.32 * w, ya + 0.32 * h);
        ctx.lineTo(xa + 0.32 * w, yb - 0.32 * h);
        ctx.stroke();
      } // free, in a run that is too short
      if (flags & CACHED) {
        ctx.fillStyle = th.own.css[k];
        const step = Math.max(4, Math.round(cell / 5)) * dpr;
        const ds = Math.max(1, Math.round(step * 0.4));
        const nx = Math.max(1, Math.floor((w - step * 0.6) / step));
        const ny = Math.max(1, Math.floor((h - step * 0.6) / step));
        const ox = Math.round(xa + (w - (nx - 1) * step - ds) / 2);
        const oy = Math.round(ya + (h - (ny - 1) * step - ds) / 2);
        for (let a = 0; a < nx; a++) {
          for (let b = 0; b < ny; b++) ctx.fillRect(ox + a * step, oy + b * step, ds, ds);
        }
      }
    }
    if (bl.marked[i]) {
      const m = Math.max(4 * dpr, Math.round(w * 0.3));
      ctx.globalAlpha = off ? 0.6 : 1;
      ctx.fillStyle = th.mark;
      ctx.beginPath();
      ctx.moveTo(xb - m, ya);
      ctx.lineTo(xb, ya);
      ctx.lineTo(xb, ya + m);
      ctx.closePath();
      ctx.fill();
    } // changed in this step: a corner
    ctx.globalAlpha = 1;
  }
  over(f, x, g) {
    const { th } = this.app;
    x.save();
    x.beginPath();
    x.rect(g.l - 2, g.t - 2, g.w + 4, g.h + 4);
    x.clip();
    x.lineJoin = "round";
    const gap = Math.max(1, Math.round(Math.min(g.sx, g.sy) * 0.07));
    const box = (i) => [
      g.l + ((i % this.cols) - 0.5 - g.x0) * g.sx,
      g.t + (Math.floor(i / this.cols) - 0.5 - g.y0) * g.sy,
      g.sx - gap,
      g.sy - gap,
    ];
    if (this.mk) {
      for (const [col, lw] of [
        [th.halo, 4],
        [th.accent, 2],
      ]) {
        x.strokeStyle = col;
        x.lineWidth = Math.min(lw, Math.max(1, g.sx / (lw > 3 ? 3 : 5)));
        x.beginPath();
        for (const i of this.mk) {
          const b = box(i);
          if (b[0] > g.l + g.w || b[1] > g.t + g.h || b[0] + b[2] < g.l || b[1] + b[3] < g.t) continue;
          x.rect(...b);
        }
        x.stroke();
      }
    }
    const one = (i, col, lw) => {
      const b = box(i);
      x.strokeStyle = th.halo;
      x.lineWidth = lw + 2;
      x.strokeRect(...b);
      x.strokeStyle = col;
      x.lineWidth = lw;
      x.strokeRect(...b);
    };
    if (this.app.R.sinkBlocks) this.pins(x, box, th);
    for (const [a, b] of this.app.R.copies || []) this.arrow(x, box(a), box(b), th);
    if (this.hov >= 0) one(this.hov, th.fg, 1.5);
    if (this.cur >= 0 && f.root.matches(":focus-visible")) one(this.cur, th.accent, 3);
    x.restore();
  }
  pins(x, box, th) {
    // blocks with attention sinks: a disc in the lower left corner
    const n = this.app.R.sinkBlocks;
    for (const q of this.app.R.rows) {
      if (q) {
        for (const i of q.blocks.slice(0, n)) {
          if (!i) continue;
          const b = box(i);
          const r = Math.max(2, Math.min(b[2], b[3]) * 0.14);
          for (const [col, d] of [
            [th.halo, 1.5],
            [th.fg, 0],
          ]) {
            x.fillStyle = col;
            x.beginPath();
            x.arc(b[0] + r + 2, b[1] + b[3] - r - 2, r + d, 0, 2 * Math.PI);
            x.fill();
          }
        }
      }
    }
  }
  arrow(x, a, b, th) {
    // copy-on-write in this step: from the block that was shared to its copy, bent, so that several in one row stay apart
    const ax = a[0] + a[2] / 2;
    const ay = a[1] + a[3] / 2;
    const bx = b[0] + b[2] / 2;
    const by = b[1] + b[3] / 2;
    const d = Math.hypot(bx - ax, by - ay) || 1;
    const k = Math.min(0.35, 0.12 + a[3] / d);
    const cx = (ax + bx) / 2 + (by - ay) * k;
    const cy = (ay + by) / 2 - (bx - ax) * k;
    const q = Math.hypot(bx - cx, by - cy) || 1;
    const ux = (bx - cx) / q;
    const uy = (by - cy) / q;
    const t = Math.max(5, Math.min(9, b[3] * 0.3));
    const ex = bx - ux * t;
    const ey = by - uy * t;
    for (const [col, lw] of [
      [th.halo, 4],
      [th.mark, 1.8],
    ]) {
      x.strokeStyle = x.fillStyle = col;
      x.lineWidth = lw;
      x.beginPath();
      x.moveTo(ax, ay);
      x.quadraticCurveTo(cx, cy, ex, ey);
      x.stroke();
      x.beginPath();
      x.moveTo(bx, by);
      x.lineTo(ex - uy * t * 0.5, ey + ux * t * 0.5);
      x.lineTo(ex + uy * t * 0.5, ey - ux * t * 0.5);
      x.closePath();
      x.fill();
    }
  }
  describe(i) {
    const copied = (this.app.R.copies || [])
      .map(([a, b]) =>
        a === i
          ? `\ncopied to block ${b} in this step (copy-on-write)`
          : b === i
            ? `\na copy of block ${a}, made in this step (copy-on-write)`
            : "",
      )
      .join("");
    const { R } = this.app;
    const n = R.sinkBlocks;
    const pinned =
      n && R.bl.refs(i) && R.holders(i).some((r) => R.rows[r] && R.rows[r].blocks.slice(0, n).includes(i))
        ? `\nholds attention sinks: every query sees its request's first ${plural(R.meta.sinks, "token")}`
        : "";
    return this.what(i) + pinned + copied;
  }
  what(i) {
    const { R } = this.app;
    const bl = R.bl;
    const kind = bl.kind(i);
    const who = R.name(bl.owner(i));
    const fill = `${bl.fill(i)} of ${plural(bl.size, "slot")} filled`;
    const changed = bl.marked[i] ? "\nchanged in this step" : "";
    if (kind === "null") return `block ${i}\nthe null block: never given out`;
    if (kind === "shared") {
      const h = R.holders(i).map((r) => R.name(r));
      return `block ${i}\nshared by ${h.length}: ${h.slice(0, 8).join(", ")}${h.length > 8 ? ", …" : ""}\n${fill}${changed}`;
    }
    if (kind === "used") {
      return `block ${i}\nowned by ${who}\n${fill}${bl.flags(i) & CACHED ? "\nfull, can be found by its hash" : ""}${changed}`;
    }
    if (kind === "reserved") return `block ${i}\nreserved for ${who}, no token yet${changed}`;
    if (kind === "cached") {
      return `block ${i}\nfree, but still holds tokens of ${who}:\na prompt that begins the same can hit it${changed}`;
    }
    if (this.frag) {
      const q = R.rows[R.waiting[0]];
      return `block ${i}\nfree, in a run of ${this.run(i)}\n${R.name(R.waiting[0])} needs ${q.need} side by side${changed}`;
    }
    return `block ${i}\nfree${changed}`;
  }
  hover(p) {
    const i = p ? this.at(p) : -1;
    if (i >= 0) this.f.showTip(p, this.describe(i));
    else this.f.hideTip();
    if (i !== this.hov) {
      this.hov = i;
      this.f.dov = true;
      this.app.dirty();
    }
  }
  pick(i) {
    this.choose(i);
    this.app.ask({ block: i });
  }
  choose(i) {
    const { R } = this.app;
    if (!R.bl.refs(i)) return this.app.select(-1);
    const h = R.holders(i);
    const at = h.indexOf(this.app.sel);
    this.app.select(at >= 0 ? h[(at + 1) % h.length] : R.bl.owner(i));
  } // a second click on a shared block goes to its next holder
  click(p) {
    const i = this.at(p);
    if (i >= 0) {
      this.cur = i;
      this.pick(i);
    }
  }
  key(e) {
    const n = this.app.R.bl.n;
    const c = this.cols;
    const m = e.shiftKey ? 8 : 1;
    const d = { ArrowLeft: -m, ArrowRight: m, ArrowUp: -c, ArrowDown: c, PageUp: -8 * c, PageDown: 8 * c }[
      e.key
    ];
    let i = this.cur < 0 ? 0 : this.cur;
    if (d !== undefined) {
      i = this.cur < 0 ? 0 : clamp(i + d, 0, n - 1);
    } else if (e.key === "Enter") {
      this.pick(i);
      return true;
    } else {
      return false;
    }
    this.cur = i;
    this.app.say(this.describe(i).replace(/\n/g, ", "));
    this.f.dov = true;
    this.app.dirty();
    return true;
  }
  summary() {
    const c = this.app.R.bl.counts();
    return `Block map, ${c.total} blocks: ${c.used} in use (${c.shared} shared), ${c.cached} cached and free, ${c.free} free.`;
  }
}
