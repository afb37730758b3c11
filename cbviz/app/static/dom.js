// Small helpers for elements. Text always goes in as text: nothing here parses HTML.
export function h(tag, attrs = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) {
    if (v === null || v === undefined || v === false) continue;
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "text") e.textContent = v;
    else e.setAttribute(k, v === true ? "" : v);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}
const SVG = "http://www.w3.org/2000/svg";
export function icon(d, size = 14) {
  const s = document.createElementNS(SVG, "svg");
  const p = document.createElementNS(SVG, "path");
  s.setAttribute("viewBox", "0 0 16 16");
  s.setAttribute("width", size);
  s.setAttribute("height", size);
  s.setAttribute("aria-hidden", "true");
  s.setAttribute("class", "cb-icon");
  p.setAttribute("d", d);
  p.setAttribute("fill", "currentColor");
  s.append(p);
  return s;
}
export const ICON = {
  reset: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  play: "M4 2.5v11l9.5-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  step: "M3 3v10l7-5zM11 3h2v10h-2z",
  end: "M2 3v10l5-5zM7 3v10l5-5zM12 3h2v10h-2z",
  save: "M7 2h2v6h3l-4 4-4-4h3zM2 13h12v1.5H2z",
  max: "M2 2h5v2H4v3H2zM9 2h5v5h-2V4H9zM2 9h2v3h3v2H2zM12 9h2v5H9v-2h3z",
  branch:
    "M4 1.5a2 2 0 0 1 .8 3.8v1.3h4.4a2 2 0 0 0 2-2V5.3a2 2 0 1 1 1.6 0v-.7a3.6 3.6 0 0 1-3.6 3.6H4.8v2.5a2 2 0 1 1-1.6 0V5.3A2 2 0 0 1 4 1.5z",
  stop: "M5 1.5h6L15 5.5v5L11 14.5H5L1 10.5v-5z",
  sides: "M1.5 2h6v12h-6zM8.5 2h6v12h-6zM10 3.5v9h3v-9z",
  rewind: "M8 3v4l6-4v10l-6-4v4L2 8z",
  on: "M6.4 3L5 4.4 8.6 8 5 11.6 6.4 13l5-5z",
  before: "M9.6 3L11 4.4 7.4 8l3.6 3.6L9.6 13l-5-5z",
  bars: "M2 3h12v3H2zM3 4v1h5V4zM2 8h12v3H2zM3 9v1h8V9zM2 12.5h12v1H2z",
  fit: "M2 2h12v12H2zM3.5 3.5v9h9v-9zM6 6h4v4H6z",
};
// Makes `host` hold one child a key, in order; `make(item)` builds it, `update(node, item)` refreshes it. Nodes that stay are not touched.
export function sync(host, items, keyOf, make, update) {
  const had = host._keys || (host._keys = new Map());
  const keys = items.map(keyOf);
  const keep = new Set(keys);
  for (const [k, n] of had) {
    if (!keep.has(k)) {
      n.remove();
      had.delete(k);
    }
  } // first, so that the rest need not move
  let at = host.firstChild;
  items.forEach((item, i) => {
    let n = had.get(keys[i]);
    if (!n) {
      n = make(item);
      had.set(keys[i], n);
    }
    if (update) update(n, item);
    if (n === at) at = at.nextSibling;
    else host.insertBefore(n, at);
  });
}
export const setText = (n, s) => {
  if (n.textContent !== s) n.textContent = s;
};
export const setAttr = (n, k, v) => {
  if (n.getAttribute(k) !== v) n.setAttribute(k, v);
};
