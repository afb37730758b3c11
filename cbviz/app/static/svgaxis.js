// An axis of a figure that we draw ourselves: from values to pixels and back, and its ticks. Pure: no DOM.
// @ts-check

/**
 * What our figures say of an axis, in plotly's words.
 * @typedef {{
 *   type?: string, range?: number[], autorange?: boolean, fixedrange?: boolean, minallowed?: number, maxallowed?: number,
 *   tickmode?: string, tickvals?: number[], ticktext?: string[], nticks?: number, tick0?: number, dtick?: number,
 *   tickformat?: string, tickprefix?: string, ticksuffix?: string, ticks?: string, ticklen?: number, tickcolor?: string,
 *   tickfont?: { size?: number }, color?: string, showline?: boolean, linecolor?: string, showgrid?: boolean,
 *   gridcolor?: string, scaleanchor?: string, title?: { text?: string, font?: { size?: number, color?: string } },
 * }} AxisSpec
 *
 * @typedef {{ value: number, label: string }} Tick
 */

/** @type {[unit: number, sign: string][]} */
const SI_SIGNS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];
/** @type {Record<string, string>} what texts.js writes for plotly's markup */
const CHARACTER_OF = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&#36;": "$" };
const MOST_TICKS = 200;
/** Least pixels between two ticks. */
const TICK_HEIGHT = 22;
const TICK_WIDTH = 46;

/**
 * The step between ticks: 1, 2 or 5 times a power of ten, so that at most `most` ticks fit.
 * @param {number} span
 * @param {number} most
 */
export function niceStep(span, most) {
  const rough = Math.max(span / Math.max(1, most), Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [1, 2, 5, 10].map((factor) => factor * power);
  return steps.find((step) => step >= rough * (1 - 1e-9)) ?? steps[steps.length - 1];
}

/**
 * A tick's label, in the few formats that our figures name.
 * @param {number} value
 * @param {string} [format]
 */
export function tickText(value, format) {
  if (format === "~s") {
    const [unit, sign] = SI_SIGNS.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
    return `${Number((value / unit).toPrecision(3))}${sign}`;
  }
  if (format === "d") return String(Math.round(value));
  return Number(value.toPrecision(6)).toLocaleString("en-US");
}

export class SvgAxis {
  /**
   * @param {AxisSpec} spec
   * @param {number} [length] pixels
   * @param {boolean} [vertical]
   */
  constructor(spec, length = 1, vertical = false) {
    this.spec = spec;
    this.length = length;
    this.vertical = vertical;
    this.log = spec.type === "log";
    const [from, to] = spec.range ?? [0, 1];
    /** @type {[number, number]} of a log axis as powers of ten */
    this.range = [from, to];
  }

  /**
   * The pixel of a value, from the left or from the top.
   * @param {number} value
   */
  d2p(value) {
    const [from, to] = this.range;
    const share = ((this.log ? Math.log10(value) : value) - from) / (to - from);
    return (this.vertical ? 1 - share : share) * this.length;
  }

  /**
   * The value at a pixel.
   * @param {number} pixel
   */
  p2d(pixel) {
    const [from, to] = this.range;
    const share = pixel / this.length;
    const value = from + (this.vertical ? 1 - share : share) * (to - from);
    return this.log ? 10 ** value : value;
  }

  /**
   * The ticks on screen.
   * @returns {Tick[]}
   */
  ticks() {
    const low = Math.min(...this.range);
    const high = Math.max(...this.range);
    return this.spec.tickmode === "array" ? this.givenTicks(low, high) : this.roundTicks(low, high);
  }

  /**
   * @param {number} low
   * @param {number} high
   */
  givenTicks(low, high) {
    const { tickvals = [], ticktext = [] } = this.spec;
    return tickvals
      .map((value, i) => ({
        value,
        label: ticktext[i].replace(/&(amp|lt|gt|#36);/g, (entity) => CHARACTER_OF[entity]),
      }))
      .filter(({ value }) => value >= low && value <= high);
  }

  /**
   * @param {number} low
   * @param {number} high
   */
  roundTicks(low, high) {
    const { nticks, dtick, tick0 = 0, tickformat, tickprefix = "", ticksuffix = "" } = this.spec;
    const most = Math.min(nticks || 8, this.length / (this.vertical ? TICK_HEIGHT : TICK_WIDTH));
    const least = this.log || tickformat === ",d" ? 1 : 0;
    const step = Math.max(least, dtick && !this.log ? dtick : niceStep(high - low, most));
    const ticks = [];
    let i = Math.ceil((low - tick0) / step - 1e-9);
    for (; tick0 + i * step <= high + 1e-9 * step && ticks.length < MOST_TICKS; i++) {
      const place = tick0 + i * step;
      const value = this.log ? 10 ** place : place;
      ticks.push({ value, label: tickprefix + tickText(value, tickformat) + ticksuffix });
    }
    return ticks;
  }

  /** Moves the range into what the figure allows, at the same width. */
  keepInside() {
    const { minallowed: least = -Infinity, maxallowed: most = Infinity } = this.spec;
    const rising = this.range[1] > this.range[0];
    let low = Math.min(...this.range);
    let high = Math.max(...this.range);
    if (low < least) [low, high] = [least, Math.min(most, high + least - low)];
    if (high > most) [low, high] = [Math.max(least, low - (high - most)), most];
    this.range = rising ? [low, high] : [high, low];
  }
}
