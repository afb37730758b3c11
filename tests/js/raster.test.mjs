// Painters write into a Uint32Array: each has a control that must fail.
import test from "node:test";
import assert from "node:assert/strict";
import { Timeline, Blocks, CACHED, NULLBLOCK } from "../../cbviz/app/static/store.js";
import { paintTimeline, paintBlocks } from "../../cbviz/app/static/raster.js";
import {
  THEMES,
  stateLut,
  ownerPalette,
  STATES,
  RANK,
  UNRANK,
  contrast,
  lstar,
} from "../../cbviz/app/static/color.js";

const rnd = (
  (s) => () =>
    (s = (s * 1664525 + 1013904223) >>> 0) / 2 ** 32
)(7);
const lut = stateLut(THEMES.light);
const isState = (p, s) =>
  p === lut.a[RANK[s]] || p === lut.b[RANK[s]] || (STATES[s] === "finished" && p === lut.a[0]); // on very thin rows a finished request is background
function make(R, T, per = 6) {
  const tl = new Timeline(R);
  const dense = new Uint8Array(R * (T + 1));
  for (let r = 0; r < R; r++) {
    let s = 0;
    [...new Set(Array.from({ length: per }, () => 1 + Math.floor(rnd() * T)))]
      .sort((a, b) => a - b)
      .forEach((t) => {
        s = 1 + ((s + Math.floor(rnd() * 10)) % 12);
        tl.push(r, t, s);
      });
    tl.t = T + 1;
    for (let t = 1; t <= T; t++) dense[r * (T + 1) + t] = tl.at(r, t).state;
  }
  return { tl, dense };
}
function wrongCentres(px, W, H, tl, v, shift = 0) {
  const sx = W / (v.x1 - v.x0);
  const sy = H / (v.y1 - v.y0);
  let bad = 0;
  let n = 0;
  for (let r = Math.ceil(v.y0); r <= v.y1 && r < tl.n; r++) {
    for (let t = Math.max(1, Math.ceil(v.x0)); t <= v.x1 && t < tl.t; t++) {
      if (r < 0) continue;
      const X = Math.floor((t - v.x0) * sx) + shift;
      const Y = Math.floor((r - v.y0) * sy);
      if (X < 0 || X >= W || Y >= H) continue;
      n++;
      if (!isState(px[Y * W + X], tl.at(r, t).state)) bad++;
    }
  }
  return { bad, n };
}

test("ranks are a permutation", () => {
  assert.deepEqual(
    [...RANK].sort((a, b) => a - b),
    STATES.map((_, i) => i),
  );
  for (let s = 0; s < STATES.length; s++) assert.equal(UNRANK[RANK[s]], s);
});

test("every cell's centre has its state's colour, for all row heights, pixel ratios and offsets", () => {
  let cells = 0;
  let noticed = 0;
  for (const dpr of [1, 1.25, 2]) {
    for (const R of [1, 3, 8, 20, 32, 64, 120]) {
      for (const off of [0, 0.3, 7.77]) {
        const W = Math.round(640 * dpr);
        const H = Math.round(258 * dpr);
        const { tl } = make(R, 100);
        const px = new Uint32Array(W * H);
        const v = { x0: 0.5 + off, x1: 100.5 + off, y0: -0.5 + off / 20, y1: R - 0.5 + off / 20 };
        paintTimeline(px, W, H, tl, v, lut, dpr);
        const c = wrongCentres(px, W, H, tl, v);
        assert.equal(c.bad, 0, JSON.stringify({ dpr, R, off, ...c }));
        cells += c.n;
        noticed += wrongCentres(px, W, H, tl, v, Math.round((2 * W) / 100)).bad;
      }
    }
  }
  assert.ok(cells > 50000);
  assert.ok(noticed > cells / 20, "control: a shift by two cells must be noticed");
});

test("zoomed out, a pixel shows the highest rank of the cells it covers (brute force)", () => {
  const R = 300;
  const T = 2000;
  const W = 97;
  const H = 41;
  const { tl, dense } = make(R, T, 40);
  const px = new Uint32Array(W * H);
  paintTimeline(px, W, H, tl, { x0: 0.5, x1: T + 0.5, y0: -0.5, y1: R - 0.5 }, lut, 1);
  const want = new Uint8Array(W * H);
  const sx = W / T;
  const sy = H / R;
  for (let r = 0; r < R; r++) {
    const y = Math.floor((r + 0.5) * sy);
    for (let t = 1; t <= T;) {
      const s = dense[r * (T + 1) + t];
      let e = t + 1;
      while (e <= T && dense[r * (T + 1) + e] === s) e++;
      const a = Math.round((t - 1) * sx);
      let b = Math.round((e - 1) * sx);
      if (b <= a) b = a + 1;
      for (let x = a; x < b && x < W; x++) want[y * W + x] = Math.max(want[y * W + x], RANK[s]);
      t = e;
    }
  }
  let bad = 0;
  for (let i = 0; i < W * H; i++) if (px[i] !== (want[i] > 1 ? lut.a[want[i]] : 0)) bad++;
  assert.ok(bad <= W * H * 0.01, `${bad} of ${W * H} pixels differ`); // neighbouring segments of one state are each at least a pixel wide
});

test("a partial repaint is bit-equal to the full one", () => {
  for (const dpr of [1, 1.25, 2]) {
    for (const R of [4, 32, 300]) {
      const W = Math.round(500 * dpr);
      const H = Math.round(200 * dpr);
      const { tl } = make(R, 150);
      const full = new Uint32Array(W * H);
      const part = new Uint32Array(W * H);
      const v = { x0: 3.3, x1: 133.3, y0: -0.5, y1: R - 0.5 };
      paintTimeline(full, W, H, tl, v, lut, dpr);
      for (const [a, b] of [
        [0, 5],
        [37, 120],
        [W - 9, W],
      ]) {
        paintTimeline(part, W, H, tl, v, lut, dpr, a, b);
        for (let y = 0; y < H; y++) {
          for (let x = a; x < b; x++) {
            if (part[y * (b - a) + x - a] !== full[y * W + x]) {
              assert.fail(`dpr ${dpr}, ${R} rows, pixel ${x},${y}`);
            }
          }
        }
      }
    }
  }
});

test("textures and thin bars are there from 3 px of bar height on", () => {
  const R = 60;
  const H = 300;
  const W = 400;
  const px = new Uint32Array(W * H);
  const tl = new Timeline(R);
  for (let r = 0; r < R; r++) tl.push(r, 1, STATES.indexOf(r % 2 ? "preempted" : "waiting"));
  tl.t = 101;
  paintTimeline(px, W, H, tl, { x0: 0.5, x1: 100.5, y0: -0.5, y1: R - 0.5 }, lut, 1);
  const P = RANK[STATES.indexOf("preempted")];
  const Q = RANK[STATES.indexOf("waiting")];
  const count = (c) => px.reduce((n, p) => n + (p === c), 0);
  assert.ok(count(lut.a[P]) > 1000 && count(lut.b[P]) > 500, "both colours of the hatch");
  assert.ok(
    count(lut.a[Q]) + count(lut.b[Q]) < (count(lut.a[P]) + count(lut.b[P])) * 0.8,
    "a waiting bar is thinner",
  );
});

test("10,000 requests x 100,000 steps: the cost follows the screen", () => {
  const R = 10000;
  const per = 8;
  const ptr = Uint32Array.from({ length: R + 1 }, (_, i) => i * per);
  const seg = new Uint32Array(R * per);
  for (let r = 0; r < R; r++) {
    let t = 1 + r * 9;
    for (let i = 0; i < per; i++) {
      seg[r * per + i] = t * 32 + [1, 2, 3, 4, 2, 3, 5, 6][i];
      t += 1 + Math.floor(rnd() * 400);
    }
  }
  const tl = Timeline.fromCSR(ptr, seg, 100001);
  const W = 1300;
  const H = 260;
  const px = new Uint32Array(W * H);
  const far = paintTimeline(px, W, H, tl, { x0: 0.5, x1: 100000.5, y0: -0.5, y1: 9999.5 }, lut, 1);
  const near = paintTimeline(px, W, H, tl, { x0: 90000.5, x1: 90100.5, y0: 9000.5, y1: 9030.5 }, lut, 1);
  assert.ok(far <= R * per && near < 400, `${far} and ${near} segments visited`);
});

test("owners: the number on a block can be read, 256 colours in both themes", () => {
  for (const th of Object.values(THEMES)) {
    const p = ownerPalette(th);
    for (let k = 0; k < 256; k++) {
      assert.ok(contrast(p.css[k], p.ink[k]) >= 4.5, `${k}: ${contrast(p.css[k], p.ink[k])}`);
    }
  }
});

test("words can be read: contrast of text at least 4.5 on every ground it stands on", () => {
  for (const th of Object.values(THEMES)) {
    for (const ground of [th.bg, th.page, th.track]) {
      for (const ink of [th.fg, th.mute]) {
        assert.ok(contrast(ink, ground) >= 4.5, `${ink} on ${ground}: ${contrast(ink, ground)}`);
      }
    }
    for (const ink of [th.accent, th.bad]) assert.ok(contrast(ink, th.bg) >= 4.5, ink);
    assert.ok(contrast(th.onAccent, th.accent) >= 4.5);
    assert.ok(contrast(th.fg, th.hot) >= 4.5);
  }
});

test("states that mean trouble differ in lightness or texture from those that don't", () => {
  for (const th of Object.values(THEMES)) {
    const L = (s) => lstar(th.state[s][0]);
    assert.ok(Math.abs(L("prefill") - L("decode")) > 12 && Math.abs(L("waiting") - L("decode")) > 12);
    for (const s of ["preempted", "swapped", "held", "padded", "recompute", "aborted"]) {
      assert.ok(Math.abs(lstar(th.state[s][1]) - L(s)) > 20, `${s}: both colours of its texture`);
    }
  }
});

test("small blocks: the pixel in each cell's middle, shared rims, cached dots, marks", () => {
  const n = 4096;
  const bl = new Blocks(n, 128);
  const cols = 128;
  const W = 1280;
  const H = 320;
  const th = { freePx: 1, bgPx: 2, fgPx: 3, mutePx: 4, markPx: 5 };
  const pal = ownerPalette(THEMES.light);
  const px = new Uint32Array(W * H);
  const t = [];
  for (let i = 0; i < n; i += 3) t.push(i, (i % 200) + 1, Blocks.pack(i % 9 ? 1 : 300, 128, 0));
  bl.apply(t);
  bl.apply([1, 8, Blocks.pack(0, 128, CACHED), 2, 0, Blocks.pack(0, 0, NULLBLOCK)]);
  bl.mark([3]);
  paintBlocks(px, W, H, bl, cols, { x0: -0.5, x1: 127.5, y0: -0.5, y1: 31.5 }, pal, th, 1);
  const at = (i, dx = 4, dy = 4) => px[(Math.floor(i / cols) * 10 + dy) * W + (i % cols) * 10 + dx];
  for (let i = 3; i < n; i++) assert.equal(at(i), bl.refs(i) ? pal.px[i % 200] : 1, `block ${i}`);
  assert.equal(at(9, 0, 4), 3, "a shared block has a rim");
  assert.equal(at(12, 0, 4), pal.px[12], "control: one that is not has none");
  assert.equal(at(3, 8, 0), 5, "changed: a corner");
  assert.notEqual(at(6, 8, 0), 5);
  assert.deepEqual([at(1, 4, 4), at(1, 5, 4)].sort(), [2, pal.px[7]].sort(), "cached: dots");
});
