// Small helpers for elements. Text always goes in as text: nothing here parses HTML.
// @ts-check

/**
 * Attributes of an element. `text` is its text, `on...` are listeners; null, undefined and false are left out.
 * @typedef {{
 *   text?: string,
 *   onclick?: (event: MouseEvent) => void,
 *   onkeydown?: (event: KeyboardEvent) => void,
 *   oninput?: (event: Event) => void,
 *   onchange?: (event: Event) => void,
 *   [name: string]: unknown,
 * }} Attributes
 */

/**
 * A new element with attributes and children.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      made.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name === "text") {
      made.textContent = String(value);
    } else if (name === "style") {
      made.style.cssText = String(value);
    } // as an attribute a page's policy may forbid it
    else {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {string} outline path of the drawing, in a box of 16 by 16
 * @param {number} size
 */
export function icon(outline, size = 14) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("width", String(size));
  svg.setAttribute("height", String(size));
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "cb-icon");
  path.setAttribute("d", outline);
  path.setAttribute("fill", "currentColor");
  svg.append(path);
  return svg;
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

/**
 * The rows that `sync` keeps, by host and key.
 * @type {WeakMap<Element, Map<string | number, { node: Element }>>}
 */
const rowsOf = new WeakMap();

/**
 * Makes `host` hold one row a key, in order. Nodes that stay are not touched.
 * @template Item
 * @template {{ node: Element }} Row
 * @param {Element} host
 * @param {readonly Item[]} items
 * @param {{
 *   key: (item: Item) => string | number,
 *   make: (item: Item) => Row,
 *   update?: (row: Row, item: Item) => void,
 * }} how
 */
export function sync(host, items, { key, make, update }) {
  const rows = /** @type {Map<string | number, Row>} */ (rowsOf.get(host) ?? new Map());
  rowsOf.set(host, rows);
  const keys = items.map(key);
  const keep = new Set(keys);
  // What goes leaves first, so that the rest need not move.
  for (const [known, row] of rows) {
    if (keep.has(known)) continue;
    row.node.remove();
    rows.delete(known);
  }
  let next = host.firstChild;
  items.forEach((item, i) => {
    let row = rows.get(keys[i]);
    if (!row) {
      row = make(item);
      rows.set(keys[i], row);
    }
    update?.(row, item);
    if (row.node === next) next = next.nextSibling;
    else host.insertBefore(row.node, next);
  });
}

/**
 * @param {Element} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * @param {Element} node
 * @param {string} name
 * @param {string} value
 */
export function setAttr(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * The drawing context of a canvas.
 * @param {HTMLCanvasElement} canvas
 */
export function contextOf(canvas) {
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser gives no canvas to draw on");
  return context;
}
