// Colours, request states and look-up tables. Pure: no DOM.
// @ts-check

/** @import { Owners, Palette, StatePixels } from "./page.js" */

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
/** @type {Record<string, string>} */
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
/** @type {{ light: Palette, dark: Palette }} */
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

/**
 * @param {number} value
 * @param {number} least
 * @param {number} most
 */
export const clamp = (value, least, most) => Math.max(least, Math.min(most, value));

/**
 * @param {number} red
 * @param {number} green
 * @param {number} blue
 */
export function hex(red, green, blue) {
  const pair = (/** @type {number} */ part) => clamp(Math.round(part), 0, 255).toString(16).padStart(2, "0");
  return `#${pair(red)}${pair(green)}${pair(blue)}`;
}

/**
 * Red, green and blue, 0 to 255 each.
 * @param {string} color
 */
export function rgb(color) {
  const value = parseInt(color.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/**
 * A pixel of a canvas: little-endian RGBA.
 * @param {string} color
 */
export function abgr(color) {
  const [red, green, blue] = rgb(color);
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * @param {string} from
 * @param {string} to
 * @param {number} share 0: `from`, 1: `to`
 */
export function mix(from, to, share) {
  const end = rgb(to);
  const [red, green, blue] = rgb(from).map((part, i) => part + (end[i] - part) * share);
  return hex(red, green, blue);
}

/** @param {number} part 0 to 255 */
function linear(part) {
  const share = part / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}

/**
 * Relative luminance, 0 to 1.
 * @param {string} color
 */
export function luminance(color) {
  const [red, green, blue] = rgb(color);
  return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
}

/**
 * Lightness as the eye sees it, 0 to 100.
 * @param {string} color
 */
export function lightness(color) {
  const value = luminance(color);
  return value > 0.008856 ? 116 * Math.cbrt(value) - 16 : 903.3 * value;
}

/**
 * Contrast of two colours, 1 to 21.
 * @param {string} one
 * @param {string} other
 */
export function contrast(one, other) {
  const values = [luminance(one), luminance(other)];
  return (Math.max(...values) + 0.05) / (Math.min(...values) + 0.05);
}

/**
 * @param {number} light
 * @param {number} chroma
 * @param {number} degrees
 */
export function oklch(light, chroma, degrees) {
  const hue = (degrees * Math.PI) / 180;
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const gamma = (/** @type {number} */ part) =>
    255 * (part <= 0.0031308 ? 12.92 * part : 1.055 * Math.max(part, 0) ** (1 / 2.4) - 0.055);
  return hex(
    gamma(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
    gamma(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
    gamma(-0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short),
  );
}

/**
 * Owner colours: golden-angle hues on three lightness levels, so that neighbouring ids differ in grey too. A cycle of 256.
 * @param {Palette} palette
 * @returns {Owners}
 */
export function ownerPalette(palette) {
  const css = [];
  const tint = [];
  const ink = [];
  for (let k = 0; k < 256; k++) {
    const color = oklch(palette.ownerL[k % 3], palette.ownerC, (k * 137.508 + 250) % 360);
    css.push(color);
    tint.push(mix(color, palette.bg, palette.dark ? 0.62 : 0.66));
    ink.push(contrast(color, "#101316") >= contrast(color, "#ffffff") ? "#101316" : "#ffffff");
  }
  return { css, tint, ink, pixels: Uint32Array.from(css, abgr), tintPixels: Uint32Array.from(tint, abgr) };
}

/**
 * The pixels of the states, by rank.
 * @param {Palette} palette
 * @returns {StatePixels}
 */
export function statePixels(palette) {
  const colors = Array.from(UNRANK, (state) => palette.state[STATES[state]]);
  return {
    plain: Uint32Array.from(colors, (pair) => abgr(pair[0])),
    texture: Uint32Array.from(colors, (pair) => abgr(pair[1] || pair[0])),
  };
}
