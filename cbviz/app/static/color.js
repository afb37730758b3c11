// Colours, request states and look-up tables. Pure: no DOM.
// The order is cbviz.trace.state.STATES: a code of the trace is an index here.
export const STATES = [
  "none",
  "waiting",
  "prefill",
  "decode",
  "preempted",
  "swapped",
  "finished",
  "idle",
  "held",
  "padded",
  "recompute",
  "aborted",
  "transferring",
  "accepted",
  "rejected",
];
export const STATE_TEXT = {
  none: "not arrived",
  waiting: "waiting",
  prefill: "prefill",
  decode: "decode",
  preempted: "preempted",
  swapped: "swapped out",
  finished: "finished",
  idle: "seated, not scheduled",
  held: "seat held (ended)",
  padded: "padded",
  recompute: "recompute",
  aborted: "aborted",
  transferring: "KV transfer",
  accepted: "drafts accepted",
  rejected: "drafts thrown away",
};
// Rank = who wins when many cells fall on one pixel: rare and alarming states win. RANK is by state, UNRANK its inverse.
export const RANK = Uint8Array.of(0, 3, 10, 6, 14, 13, 1, 4, 5, 11, 12, 2, 9, 7, 8);
export const UNRANK = Uint8Array.from({ length: 15 }, (_, r) => RANK.indexOf(r));

// The second colour of a state is that of its texture (raster.js has the patterns).
export const THEMES = {
  light: {
    dark: false,
    bg: "#ffffff",
    page: "#f2f4f7",
    fg: "#1b1f24",
    mute: "#57606a",
    line: "#d3dae1",
    track: "#f1f3f6",
    accent: "#0b57d0",
    onAccent: "#ffffff",
    halo: "#ffffff",
    tip: "#1b1f24",
    tipfg: "#ffffff",
    bad: "#b3261e",
    hot: "#fff1c9",
    mark: "#c2185b",
    state: {
      none: ["#f1f3f6"],
      waiting: ["#b9c2cc", "#99a4b0"],
      prefill: ["#efa51f"],
      decode: ["#0b6aa8"],
      preempted: ["#d55e00", "#ffe3cf"],
      swapped: ["#b9578f", "#fbe9f3"],
      finished: ["#d6dde4"],
      idle: ["#8fc1e3", "#8fc1e3"],
      held: ["#93a1af", "#e6ebf0"],
      padded: ["#7a6a58", "#e9dfd3"],
      recompute: ["#efa51f", "#8c3d00"],
      aborted: ["#c3564f", "#f7dcda"],
      transferring: ["#1b8a6b", "#d2efe6"],
      accepted: ["#0b6aa8", "#9be7c4"],
      rejected: ["#0b6aa8", "#ffc98a"],
    },
    free: "#edf0f4",
    freeLine: "#dfe4ea",
    ownerL: [0.75, 0.645, 0.85],
    ownerC: 0.115,
    lines: ["#0b6aa8", "#b35c00"],
  },
  dark: {
    dark: true,
    bg: "#14181d",
    page: "#0d1014",
    fg: "#e6eaef",
    mute: "#9aa5b1",
    line: "#333c46",
    track: "#1b2027",
    accent: "#7db7ff",
    onAccent: "#0b0d10",
    halo: "#0b0d10",
    tip: "#e6eaef",
    tipfg: "#111418",
    bad: "#ff8a80",
    hot: "#4a3b0c",
    mark: "#ff7eb6",
    state: {
      none: ["#1b2027"],
      waiting: ["#55606d", "#75818e"],
      prefill: ["#f6c04d"],
      decode: ["#3f9fdd"],
      preempted: ["#e2691a", "#3b1a03"],
      swapped: ["#db9fc6", "#3d1730"],
      finished: ["#2d3640"],
      idle: ["#2b5f86", "#2b5f86"],
      held: ["#66727f", "#262d35"],
      padded: ["#a8937a", "#39302a"],
      recompute: ["#f6c04d", "#7a3300"],
      aborted: ["#cc5a52", "#3d1a18"],
      transferring: ["#45c29c", "#10382c"],
      accepted: ["#3f9fdd", "#063a2a"],
      rejected: ["#3f9fdd", "#5a2d00"],
    },
    free: "#1d232a",
    freeLine: "#272e37",
    ownerL: [0.72, 0.645, 0.8],
    ownerC: 0.115,
    lines: ["#4aa8e0", "#f6a64d"],
  },
};

export const clamp = (v, a, b) => Math.max(a, Math.min(b, v));
export const hex = (r, g, b) =>
  "#" + [r, g, b].map((v) => clamp(Math.round(v), 0, 255).toString(16).padStart(2, "0")).join("");
export function rgb(h) {
  const v = parseInt(h.slice(1), 16);
  return [v >> 16, (v >> 8) & 255, v & 255];
}
export const abgr = (h) => {
  const [r, g, b] = rgb(h);
  return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
}; // little-endian RGBA
export function mix(a, b, t) {
  const A = rgb(a);
  const B = rgb(b);
  return hex(...A.map((v, i) => v + (B[i] - v) * t));
}
const linear = (c) => {
  c /= 255;
  return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
};
export function lum(h) {
  const [r, g, b] = rgb(h);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
}
export const lstar = (h) => {
  const y = lum(h);
  return y > 0.008856 ? 116 * Math.cbrt(y) - 16 : 903.3 * y;
};
export const contrast = (a, b) => {
  const x = lum(a);
  const y = lum(b);
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
};
export function oklch(L, C, degrees) {
  const h = (degrees * Math.PI) / 180;
  const a = C * Math.cos(h);
  const b = C * Math.sin(h);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const g = (v) => 255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * Math.max(v, 0) ** (1 / 2.4) - 0.055);
  return hex(
    g(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    g(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    g(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  );
}
// Owner colours: golden-angle hues on three lightness levels, so that neighbouring ids differ in grey too. A cycle of 256.
export function ownerPalette(th) {
  const css = [];
  const tint = [];
  const ink = [];
  for (let k = 0; k < 256; k++) {
    const c = oklch(th.ownerL[k % 3], th.ownerC, (k * 137.508 + 250) % 360);
    css.push(c);
    tint.push(mix(c, th.bg, th.dark ? 0.62 : 0.66));
    ink.push(contrast(c, "#101316") >= contrast(c, "#ffffff") ? "#101316" : "#ffffff");
  }
  return { css, tint, ink, px: Uint32Array.from(css, abgr), tpx: Uint32Array.from(tint, abgr) };
}
export function stateLut(th) {
  // indexed by RANK
  const n = STATES.length;
  const a = new Uint32Array(n);
  const b = new Uint32Array(n);
  for (let r = 0; r < n; r++) {
    const c = th.state[STATES[UNRANK[r]]];
    a[r] = abgr(c[0]);
    b[r] = abgr(c[1] || c[0]);
  }
  return { a, b };
}
