// The batch of one step as one bar of tokens: whose they are (colour) and what they are for (texture of the strip below).
import { cut } from "./format.js";
import { isolated } from "./texts.js";
export const KINDS = ["prefill", "decode", "recompute", "padded"];
export class BatchBar {
  constructor(canvas, app) {
    this.c = canvas;
    this.app = app;
    this.dirty = true;
    this.w = this.h = 0;
    this.ro = new ResizeObserver((e) => {
      this.w = e[0].contentRect.width;
      this.h = e[0].contentRect.height;
      this.dirty = true;
      app.dirty();
    });
    this.ro.observe(canvas);
    canvas.addEventListener("click", (e) => {
      const k = this.at(e);
      if (k) app.select(k.r);
    });
    canvas.addEventListener("mousemove", (e) => {
      const k = this.at(e);
      canvas.title = k
        ? `${app.R.id(k.r)}: ${k.n} ${KINDS[k.kind]}, positions ${k.start}–${k.start + k.n - 1}`
        : "";
    });
  }
  at(e) {
    const x = e.offsetX;
    return (this.hit || []).find((h) => x >= h.xa && x < h.xb)?.k ?? null;
  }
  sums() {
    const s = [0, 0, 0, 0];
    for (const k of this.app.R.chunks) s[k.kind] += k.n;
    s[3] += this.app.R.pad;
    return s;
  }
  paint() {
    if (!this.dirty) return;
    this.dirty = false;
    const { R, th } = this.app;
    const c = this.c;
    const dpr = devicePixelRatio || 1;
    const { w, h } = this;
    if (!w) {
      this.dirty = true;
      return;
    }
    if (c.width !== Math.round(w * dpr) || c.height !== Math.round(h * dpr)) {
      c.width = Math.round(w * dpr);
      c.height = Math.round(h * dpr);
    }
    const x = c.getContext("2d");
    x.setTransform(dpr, 0, 0, dpr, 0, 0);
    x.clearRect(0, 0, w, h);
    const total = R.chunks.reduce((a, k) => a + k.n, 0) + R.pad;
    const top = Math.max(total, Math.min(R.config.budget || 0, Math.max(4 * total, 32)) || 1);
    const bar = h - 7;
    this.hit = [];
    x.fillStyle = th.track;
    x.fillRect(0, 0, w, bar);
    let at = 0;
    const px = (v) => Math.round((v / top) * w);
    x.font = `600 11px ${th.font}`;
    x.textAlign = "center";
    x.textBaseline = "middle";
    for (const k of R.chunks) {
      const xa = px(at);
      const xb = Math.max(xa + 1, px(at + k.n));
      const g = xb - xa > 4 ? 1 : 0;
      at += k.n;
      this.hit.push({ xa, xb, k });
      x.fillStyle = th.own.css[k.r & 255];
      x.fillRect(xa, 0, xb - xa - g, bar);
      x.fillStyle = th.state[KINDS[k.kind]][0];
      x.fillRect(xa, bar + 2, xb - xa - g, 5);
      if (k.r === this.app.sel) {
        x.strokeStyle = th.accent;
        x.lineWidth = 2;
        x.strokeRect(xa + 1, 1, Math.max(1, xb - xa - g - 2), bar - 2);
      }
      if (xb - xa >= 22) {
        x.fillStyle = th.own.ink[k.r & 255];
        x.fillText(isolated(cut(R.id(k.r), Math.floor((xb - xa) / 7))), (xa + xb - g) / 2, bar / 2 + 0.5);
      }
    }
    if (R.pad) {
      const xa = px(at);
      const xb = px(at + R.pad);
      x.fillStyle = th.state.padded[0];
      x.fillRect(xa, 0, Math.max(1, xb - xa), bar);
      x.fillRect(xa, bar + 2, Math.max(1, xb - xa), 5);
    }
    this.top = top;
  }
  summary() {
    const s = this.sums();
    const n = s.reduce((a, b) => a + b, 0);
    return n
      ? `Batch of step ${this.app.R.step}: ${n} tokens of ${this.app.R.chunks.length} requests; ` +
          KINDS.map((k, i) => `${s[i]} ${k}`).join(", ")
      : "No batch";
  }
}
