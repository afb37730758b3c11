// Painters into a Uint32Array of device pixels. Pure: no DOM, so testable in node. The cost is bounded by the screen and by
// the number of VISIBLE segments, never by requests x steps.
import { RANK, STATES } from "./color.js";
import { CACHED, NULLBLOCK } from "./store.js";

// Textures by state, as a function of the pixel; true = the state's second colour. They are drawn from 2 px of bar height on.
const PERIOD = 12;
const PATTERN = {
  preempted: (x, y) => (x + y) % 6 < 2,
  swapped: (x, y) => y % 4 < 1,
  waiting: (x) => x % 4 === 1,
  recompute: (x, y) => (x + y) % 4 < 1,
  held: (x, y) => (x - y + 12) % 4 < 2,
  padded: (x, y) => x % 4 < 1 || y % 4 < 1,
  aborted: (x) => x % 4 < 2,
  transferring: (x) => x % 3 < 1,
  accepted: (x, y) => y % 3 < 1,
  rejected: (x, y) => x % 4 < 2 && y % 4 < 2,
};
// Part of the bar's height left empty above and below: thin bars are requests that do no work.
const THIN = { waiting: 0.36, finished: 0.45, aborted: 0.4, idle: 0.25, held: 0.25 };
const byRank = (table, none) => {
  const a = new Array(STATES.length).fill(none);
  for (const s in table) a[RANK[STATES.indexOf(s)]] = table[s];
  return a;
};
const PATTERNS = byRank(PATTERN, null);
const INSET = byRank(THIN, 0);
const tileCache = new Map();
function tileFor(k) {
  if (tileCache.has(k)) return tileCache.get(k);
  const P = PERIOD * k;
  const m = PATTERNS.map((f) => {
    if (!f) return null;
    const t = new Uint8Array(P * P);
    for (let y = 0; y < P; y++) {
      for (let x = 0; x < P; x++) t[y * P + x] = f(Math.floor(x / k), Math.floor(y / k)) ? 1 : 0;
    }
    return t;
  });
  tileCache.set(k, { P, m });
  return tileCache.get(k);
}
const TEXTURED = PATTERNS.reduce((m, f, k) => (f ? m | (1 << k) : m), 0);
let LINE = new Uint8Array(0);

// c0..c1: pixel columns to paint (the buffer then is c1 - c0 wide), so a partial repaint is bit-equal to a full one.
// v = { x0, x1, y0, y1 }: data coordinates of the left, right, top and bottom edge. Row r, step t covers [t-.5, t+.5] x [r-.5, r+.5].
export function paintTimeline(px, W, H, st, v, lut, dpr = 1, c0 = 0, c1 = W) {
  const { a: A, b: B2 } = lut;
  const sx = W / (v.x1 - v.x0);
  const sy = H / (v.y1 - v.y0);
  const tEnd = st.t;
  const x0 = v.x0;
  if (LINE.length < W) LINE = new Uint8Array(W);
  const line = LINE;
  const S = c1 - c0;
  let fin = c1;
  let tex = 0;
  let segs = 0;
  px.fill(0, 0, S * H);
  const edge = (t) => Math.round((t - 0.5 - x0) * sx);
  const inside = (c) => Math.max(c0, Math.min(c1, c));
  const tL = Math.max(0, Math.floor(x0 + 0.5 + (c0 - 1) / sx));
  const xNow = inside(edge(tEnd));
  const xZero = inside(edge(1));
  const fillRow = (r) => {
    const a = st.rows[r];
    const n = st.len[r];
    if (!n) return;
    let i = st.find(r, tL);
    if (i < 0) i = 0;
    for (; i < n; i++) {
      const k = RANK[a[i] & 31];
      const step = a[i] >>> 5;
      if (step >= tEnd) break;
      let xa = edge(step);
      if (xa >= c1) break;
      segs++;
      if (!k) continue;
      if (i + 1 === n && k === 1) {
        if (xa < c0) xa = c0;
        if (xa < fin) fin = xa;
        break;
      } // a finished tail is kept as one number a pixel row
      let xb = edge(i + 1 < n ? Math.min(tEnd, a[i + 1] >>> 5) : tEnd);
      if (xb <= xa) xb = xa + 1;
      if (xa < c0) xa = c0;
      if (xb > c1) xb = c1; // never thinner than one pixel
      tex |= 1 << k;
      for (let c = xa; c < xb; c++) if (line[c] < k) line[c] = k;
    }
  };
  const T = tileFor(Math.max(1, Math.round(dpr)));
  const P = T.P;
  const ox = ((-Math.round(x0 * sx) % P) + P) % P;
  const track = sy >= 2 * dpr;
  const pal = new Uint32Array(A.length);
  const inset = new Int32Array(A.length);
  const emit = (top, bot) => {
    for (let c = fin; c < xNow; c++) if (!line[c]) line[c] = 1;
    const h = bot - top;
    const g =
      h >= 22 * dpr
        ? Math.round(3 * dpr)
        : h >= 10 * dpr
          ? Math.round(1.5 * dpr)
          : h >= 4 * dpr
            ? Math.ceil(0.5 * dpr)
            : 0;
    const y0 = top + g;
    const y1 = bot - g;
    const bh = y1 - y0;
    const ya = Math.max(0, y0);
    const yb = Math.min(H, y1);
    const fancy = bh >= 2 * dpr;
    let first = -1;
    if (fancy) {
      for (let k = 0; k < A.length; k++) {
        inset[k] = bh < 3 * dpr ? 0 : Math.min(Math.floor(INSET[k] * bh), Math.floor((bh - 1) / 2));
      }
    } // at least one pixel row stays
    for (let y = ya; y < yb; y++) {
      const o = y * S - c0;
      if (!fancy) {
        if (first < 0) {
          first = o + c0;
          for (let c = xZero; c < xNow; c++) {
            const k = line[c];
            px[o + c] = k > 1 ? A[k] : track ? A[0] : 0;
          }
        } else {
          px.copyWithin(o + c0, first, first + S);
        }
        continue;
      }
      const d = Math.min(y - y0, y1 - 1 - y);
      for (let k = 0; k < A.length; k++) pal[k] = d >= inset[k] ? A[k] : A[0];
      if (!(tex & TEXTURED)) {
        for (let c = xZero; c < xNow; c++) px[o + c] = pal[line[c]];
        continue;
      }
      const ty = (y % P) * P;
      for (let c = xZero; c < xNow; c++) {
        const k = line[c];
        const m = T.m[k];
        px[o + c] = m && d >= inset[k] && m[ty + ((c + ox) % P)] ? B2[k] : pal[k];
      }
    }
  };
  const r0 = Math.max(0, Math.ceil(v.y0 - 0.5));
  const r1 = Math.min(st.n - 1, Math.floor(v.y1 + 0.5));
  let cur = -1;
  line.fill(0, c0, c1);
  for (let r = r0; r <= r1; r++) {
    if (sy >= 1) {
      fillRow(r);
      emit(Math.round((r - 0.5 - v.y0) * sy), Math.round((r + 0.5 - v.y0) * sy));
      line.fill(0, c0, c1);
      fin = c1;
      tex = 0;
    } else {
      const y = Math.min(H - 1, Math.max(0, Math.floor((r - v.y0) * sy)));
      if (y !== cur) {
        if (cur >= 0) {
          emit(cur, cur + 1);
          line.fill(0, c0, c1);
          fin = c1;
          tex = 0;
        }
        cur = y;
      }
      fillRow(r);
    }
  }
  if (cur >= 0) emit(cur, cur + 1);
  return segs;
}

// Small cells (below about 9 css px). `dim`: Uint8Array of blocks to dim, or null.
export function paintBlocks(px, W, H, bl, cols, v, pal, th, dpr = 1, dim = null) {
  const sx = W / (v.x1 - v.x0);
  const sy = H / (v.y1 - v.y0);
  const n = bl.n;
  const w = bl.w;
  const rows = Math.ceil(n / cols);
  px.fill(0, 0, W * H);
  const gap = Math.min(sx, sy) >= 6 * dpr ? dpr : Math.min(sx, sy) >= 3 ? 1 : 0;
  const rim = Math.ceil(dpr);
  const dot = Math.max(2, Math.round(2 * dpr));
  const cx = new Int32Array(W);
  const cx2 = new Int32Array(W);
  const ex = new Uint8Array(W);
  for (let c = 0; c < W; c++) {
    const i = Math.floor(v.x0 + (c + 0.5) / sx + 0.5);
    const e = Math.round((i + 0.5 - v.x0) * sx);
    const s = Math.round((i - 0.5 - v.x0) * sx);
    cx[c] = i < 0 || i >= cols || c >= e - gap ? -1 : i;
    cx2[c] = sx < 1 ? Math.min(cols - 1, Math.floor(v.x0 + (c + 1) / sx + 0.5)) : i;
    ex[c] = (c < s + rim || c >= e - gap - rim ? 1 : 0) | (c >= e - gap - dot ? 2 : 0);
  }
  const weight = (b) => {
    const q = w[2 * b + 1];
    const r = q >>> 16;
    return r > 1 ? 3 : r ? 2 : q & CACHED ? 1 : 0;
  };
  for (let y = 0; y < H; y++) {
    const row = Math.floor(v.y0 + (y + 0.5) / sy + 0.5);
    if (row < 0 || row >= rows) continue;
    const e = Math.round((row + 0.5 - v.y0) * sy);
    const s = Math.round((row - 0.5 - v.y0) * sy);
    if (y >= e - gap) continue;
    const row2 = sy < 1 ? Math.min(rows - 1, Math.floor(v.y0 + (y + 1) / sy + 0.5)) : row;
    const ey = (y < s + rim || y >= e - gap - rim ? 1 : 0) | (y < s + dot ? 2 : 0);
    for (let x = 0, o = y * W; x < W; x++) {
      if (cx[x] < 0) continue;
      let b = row * cols + cx[x];
      if (b >= n) continue;
      if (sx < 1 || sy < 1) {
        let best = weight(b);
        for (let rr = row; rr <= row2 && best < 3; rr++) {
          for (let cc = cx[x]; cc <= cx2[x]; cc++) {
            const bb = rr * cols + cc;
            if (bb < n) {
              const k = weight(bb);
              if (k > best) {
                best = k;
                b = bb;
              }
            }
          }
        }
      }
      const q = w[2 * b + 1];
      const refs = q >>> 16;
      const own = (w[2 * b] - 1) & 255;
      let p;
      if (q & NULLBLOCK) {
        p = gap && (x + y) % 3 === 0 ? th.mutePx : th.freePx;
      } else if (refs) {
        p = dim && dim[b] ? pal.tpx[own] : pal.px[own];
        if (refs > 1 && gap && (ex[x] | ey) & 1) p = th.fgPx;
      } else if (q & CACHED) {
        p = gap ? ((x + y) & 1 ? pal.px[own] : th.bgPx) : pal.tpx[own];
      } else {
        p = th.freePx;
      }
      if (bl.marked[b] && gap && ex[x] & 2 && ey & 2) p = th.markPx;
      px[o + x] = p;
    }
  }
}
