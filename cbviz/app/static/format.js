// Numbers and names as people read them. Pure: no DOM.
export const nf = new Intl.NumberFormat("en-US");
export function seconds(s) {
  if (s == null || !isFinite(s)) return "–";
  const a = Math.abs(s);
  return a >= 100
    ? s.toFixed(0) + " s"
    : a >= 1
      ? s.toFixed(2) + " s"
      : a >= 1e-3
        ? sig(s * 1e3) + " ms"
        : a > 0
          ? sig(s * 1e6) + " µs"
          : "0 s";
}
export function sig(v) {
  const a = Math.abs(v);
  return a >= 100 ? nf.format(Math.round(v)) : a >= 10 ? v.toFixed(1) : v.toFixed(2);
}
export const percent = (v) =>
  v == null || !isFinite(v) ? "–" : (100 * v).toFixed(v < 0.0995 && v > 0 ? 1 : 0) + " %";
export const plural = (n, one, many = one + "s") => `${nf.format(n)} ${n === 1 ? one : many}`;
// What fits in a block's cell: the number at the end of an id, else its first letters.
export function shortId(id) {
  const m = /(\d{1,4})(\.\d{1,2})?$/.exec(id);
  return m ? +m[1] + (m[2] || "") : id.slice(0, 3);
} // a sequence of n > 1 keeps its number: r1.2 -> 1.2
export const cut = (s, n) => (s.length <= n ? s : s.slice(0, n - 1) + "…");
export const rate = (v, unit) => (v >= 1e12 ? `${sig(v / 1e12)} T${unit}` : `${sig(v / 1e9)} G${unit}`);
export const compact = (v) =>
  v >= 1e6
    ? (v / 1e6).toFixed(1) + "M"
    : v >= 1e4
      ? (v / 1e3).toFixed(1) + "k"
      : Number.isInteger(v)
        ? nf.format(v)
        : sig(v);
