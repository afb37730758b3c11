// Numbers and names as people read them. Pure: no DOM.
// @ts-check

const ENGLISH = new Intl.NumberFormat("en-US");

/**
 * A whole number with its thousands apart: 12,345.
 * @param {number} value
 */
export const grouped = (value) => ENGLISH.format(value);

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0) + " s";
  if (size >= 1) return value.toFixed(2) + " s";
  if (size >= 1e-3) return significant(value * 1e3) + " ms";
  if (size > 0) return significant(value * 1e6) + " µs";
  return "0 s";
}

/**
 * About three digits.
 * @param {number} value
 */
export function significant(value) {
  const size = Math.abs(value);
  if (size >= 100) return grouped(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** @param {number | null | undefined} share */
export function percent(share) {
  if (share == null || !isFinite(share)) return "–";
  const digits = share < 0.0995 && share > 0 ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
}

/**
 * @param {number} count
 * @param {string} one
 * @param {string} [many]
 */
export const plural = (count, one, many = one + "s") => `${grouped(count)} ${count === 1 ? one : many}`;

/**
 * What fits in a block's cell: the number at the end of an id, else its first letters. Another sequence of a request keeps its number (r1.2 -> 1.2).
 * @param {string} id
 */
export function shortId(id) {
  const match = /(\d{1,4})(\.\d{1,2})?$/.exec(id);
  return match ? Number(match[1]) + (match[2] || "") : id.slice(0, 3);
}

/**
 * @param {string} text
 * @param {number} most letters
 */
export const cut = (text, most) => (text.length <= most ? text : text.slice(0, most - 1) + "…");

/**
 * @param {number} value
 * @param {string} unit
 */
export function rate(value, unit) {
  return value >= 1e12 ? `${significant(value / 1e12)} T${unit}` : `${significant(value / 1e9)} G${unit}`;
}

/** @param {number} value */
export function compact(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + "k";
  return Number.isInteger(value) ? grouped(value) : significant(value);
}
