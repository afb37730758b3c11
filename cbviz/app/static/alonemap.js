// A map of differences: layers down, positions across; the darker, the more units in the last place.
// @ts-check
import { contextOf, element } from "./dom.js";

/** @import { Alone } from "./messages.js" */

const MAP_LEFT = 54;
const MAP_BELOW = 16;
const MAP_ABOVE = 12;

/** @param {number} value */
export function tiny(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

export const ULP_SHADES = ["equal", "≤ ¼", "½", "1", "2", "4", "8", "more"];
const DARKEST = ULP_SHADES.length - 1;

/**
 * Shade of a difference in units in the last place, by powers of two. 0: equal, 1: up to a quarter of a unit, 7: above 8, -1: not known.
 * @param {number | null} ulps
 */
export function ulpShade(ulps) {
  if (ulps === null) return -1;
  if (ulps === 0) return 0;
  return Math.max(1, Math.min(DARKEST, Math.ceil(Math.log2(ulps)) + 3));
}

/** @param {number} shade 1 to 7 */
const shadeAlpha = (shade) => 0.12 + (0.88 * shade) / DARKEST;

/**
 * Which cell a place on the map is.
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {number} layers
 * @param {number} positions
 * @returns {[layer: number, position: number] | null}
 */
export function cellAt(x, y, width, height, layers, positions) {
  if (x < 0 || y < 0 || x >= width || y >= height) return null;
  return [Math.floor((y / height) * layers), Math.floor((x / width) * positions)];
}

export class AloneMap {
  constructor() {
    this.canvas = element("canvas", { class: "cb-alonemap", role: "img" });
    this.key = element("div", { class: "cb-alonekey" });
    this.width = 0;
    this.height = 0;
  }

  /** The map in the window. */
  area() {
    const box = this.canvas.getBoundingClientRect();
    return { left: box.left + MAP_LEFT, top: box.top + MAP_ABOVE, width: this.width, height: this.height };
  }

  colors() {
    const style = getComputedStyle(this.canvas);
    const read = (/** @type {string} */ name) => style.getPropertyValue("--cb-" + name).trim();
    return {
      ground: read("track"),
      hot: read("accent"),
      line: read("line"),
      mute: read("mute"),
      fg: read("fg"),
      bad: read("bad"),
    };
  }

  /**
   * @param {Alone} message
   * @param {string} font
   */
  paint(message, font) {
    const layers = message.apart.length;
    const positions = layers ? message.apart[0].length : 0;
    const canvasWidth = this.canvas.clientWidth;
    if (!canvasWidth || !positions) return;
    this.width = canvasWidth - MAP_LEFT - 4;
    this.height = Math.max(60, Math.min(190, 6 * layers));
    const context = this.sized(canvasWidth, this.height + MAP_ABOVE + MAP_BELOW);
    context.font = "11px " + font;
    this.paintCells(context, message, layers, positions);
    this.paintAxes(context, message, layers, positions);
    this.paintMarks(context, message, positions);
    this.drawKey();
    this.canvas.setAttribute(
      "aria-label",
      `Differences of ${message.id}: ${layers} layers by ${positions} positions. ${message.sentences.join(" ")}`,
    );
  }

  /**
   * @param {number} width
   * @param {number} height
   */
  sized(width, height) {
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = height + "px";
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = contextOf(this.canvas);
    context.scale(ratio, ratio);
    return context;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Alone} message
   * @param {number} layers
   * @param {number} positions
   */
  paintCells(context, { ulps }, layers, positions) {
    const { ground, hot, mute } = this.colors();
    const wide = this.width / positions;
    const high = this.height / layers;
    for (let layer = 0; layer < layers; layer++) {
      for (let position = 0; position < positions; position++) {
        const shade = ulpShade(ulps[layer][position]);
        const x = MAP_LEFT + (this.width * position) / positions;
        const y = MAP_ABOVE + (this.height * layer) / layers;
        context.globalAlpha = 1;
        context.fillStyle = ground;
        context.fillRect(x, y, wide, high);
        if (shade > 0) {
          context.globalAlpha = shadeAlpha(shade);
          context.fillStyle = hot;
          context.fillRect(x, y, wide, high);
        } else if (shade < 0) {
          context.globalAlpha = 0.5;
          context.strokeStyle = mute;
          strokeLine(context, x, y + high, x + wide, y);
        }
      }
    }
    context.globalAlpha = 1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Alone} message
   * @param {number} layers
   * @param {number} positions
   */
  paintAxes(context, { num_prompt }, layers, positions) {
    const { line, mute, fg } = this.colors();
    const below = MAP_ABOVE + this.height + 3;
    context.strokeStyle = line;
    context.strokeRect(MAP_LEFT - 0.5, MAP_ABOVE - 0.5, this.width + 1, this.height + 1);
    context.fillStyle = mute;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const layer of [0, Math.floor((layers - 1) / 2), layers - 1]) {
      const y = MAP_ABOVE + (this.height * (layer + 0.5)) / layers;
      context.fillText(`layer ${layer}`, MAP_LEFT - 6, y);
    }
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText("0, prompt", MAP_LEFT, below);
    if (num_prompt >= positions) return;
    const x = MAP_LEFT + (this.width * num_prompt) / positions;
    context.fillText(`${num_prompt}, output`, Math.min(x, MAP_LEFT + this.width - 60), below);
    context.strokeStyle = fg;
    context.setLineDash([3, 3]);
    strokeLine(context, x, MAP_ABOVE, x, MAP_ABOVE + this.height);
    context.setLineDash([]);
  }

  /**
   * Where chunks begin, and where alone the next token would be another.
   * @param {CanvasRenderingContext2D} context
   * @param {Alone} message
   * @param {number} positions
   */
  paintMarks(context, { chunks, tokens }, positions) {
    const { fg, bad } = this.colors();
    const xOf = (/** @type {number} */ position) => MAP_LEFT + (this.width * position) / positions;
    context.strokeStyle = fg;
    for (const [start] of chunks) {
      const x = xOf(start) + 0.5;
      strokeLine(context, x, MAP_ABOVE - 5, x, MAP_ABOVE - 1);
    }
    context.fillStyle = bad;
    context.textAlign = "center";
    context.textBaseline = "bottom";
    for (const { changed, position } of tokens) {
      if (changed) context.fillText("≠", xOf(Math.min(positions - 0.5, position - 0.5)), MAP_ABOVE - 1);
    }
  }

  drawKey() {
    const { ground, hot } = this.colors();
    const shades = ULP_SHADES.map((text, shade) => {
      const style = shade ? `background:${hot};opacity:${shadeAlpha(shade)}` : `background:${ground}`;
      const swatch = element("i", { class: "cb-aloneswatch", "aria-hidden": "true", style });
      return element("span", { class: "cb-key" }, swatch, text);
    });
    const signs =
      "ticks above: where a chunk begins; ≠: alone, the next token would be another; struck out: no longer in the cache";
    this.key.replaceChildren(
      element("span", { class: "cb-note", text: "units in the last place:" }),
      ...shades,
      element("span", { class: "cb-note", text: signs }),
    );
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 */
function strokeLine(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
