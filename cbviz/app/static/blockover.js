// What lies over the block map: the picked request's blocks, attention sinks, copies made in the step, cursor and mouse.
// @ts-check

/** @import { App } from "./page/state.js" */
/** @import { Geometry } from "./page.js" */
/** @import { Frame } from "./frame.js" */

/** @typedef {{ left: number, top: number, width: number, height: number }} Box */
/** @typedef {(block: number) => Box} BoxOf */

/**
 * @param {Frame} frame
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 * @param {{ columns: number, picked: Set<number> | null, hovered: number, cursor: number }} map
 */
export function paintBlocksOver(frame, context, geometry, app, map) {
  const { run, theme } = app;
  const { left, top, width, height, perX, perY } = geometry;
  const gap = Math.max(1, Math.round(Math.min(perX, perY) * 0.07));
  /** @type {BoxOf} */
  const boxOf = (block) => ({
    left: left + ((block % map.columns) - 0.5 - geometry.x0) * perX,
    top: top + (Math.floor(block / map.columns) - 0.5 - geometry.y0) * perY,
    width: perX - gap,
    height: perY - gap,
  });
  context.save();
  context.beginPath();
  context.rect(left - 2, top - 2, width + 4, height + 4);
  context.clip();
  context.lineJoin = "round";
  if (map.picked) outlinePicked(context, geometry, app, map.picked, boxOf);
  if (run.sinkBlocks) paintSinks(context, app, boxOf);
  for (const [from, to] of run.copies) paintArrow(context, app, boxOf(from), boxOf(to));
  if (map.hovered >= 0) outline(context, app, boxOf(map.hovered), theme.fg, 1.5);
  const focused = frame.root.matches(":focus-visible");
  if (map.cursor >= 0 && focused) outline(context, app, boxOf(map.cursor), theme.accent, 3);
  context.restore();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 * @param {Set<number>} picked
 * @param {BoxOf} boxOf
 */
function outlinePicked(context, geometry, { theme }, picked, boxOf) {
  const { left, top, width, height, perX } = geometry;
  const boxes = Array.from(picked, boxOf).filter(
    (box) =>
      box.left <= left + width &&
      box.top <= top + height &&
      box.left + box.width >= left &&
      box.top + box.height >= top,
  );
  const stroke = (/** @type {string} */ color, /** @type {number} */ lineWidth) => {
    context.strokeStyle = color;
    context.lineWidth = lineWidth;
    context.beginPath();
    for (const box of boxes) context.rect(box.left, box.top, box.width, box.height);
    context.stroke();
  };
  stroke(theme.halo, Math.min(4, Math.max(1, perX / 3)));
  stroke(theme.accent, Math.min(2, Math.max(1, perX / 5)));
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {App} app
 * @param {Box} box
 * @param {string} color
 * @param {number} lineWidth
 */
function outline(context, { theme }, box, color, lineWidth) {
  context.strokeStyle = theme.halo;
  context.lineWidth = lineWidth + 2;
  context.strokeRect(box.left, box.top, box.width, box.height);
  context.strokeStyle = color;
  context.lineWidth = lineWidth;
  context.strokeRect(box.left, box.top, box.width, box.height);
}

/**
 * Blocks with attention sinks: a disc in the lower left corner.
 * @param {CanvasRenderingContext2D} context
 * @param {App} app
 * @param {BoxOf} boxOf
 */
function paintSinks(context, { run, theme }, boxOf) {
  for (const request of run.rows) {
    for (const block of request?.blocks.slice(0, run.sinkBlocks) ?? []) {
      if (!block) continue;
      const box = boxOf(block);
      const radius = Math.max(2, Math.min(box.width, box.height) * 0.14);
      const x = box.left + radius + 2;
      const y = box.top + box.height - radius - 2;
      fillDisc(context, x, y, radius + 1.5, theme.halo);
      fillDisc(context, x, y, radius, theme.fg);
    }
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} radius
 * @param {string} color
 */
function fillDisc(context, x, y, radius, color) {
  context.fillStyle = color;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/**
 * Copy-on-write in this step: from the block that was shared to its copy, bent, so that several in one row stay apart.
 * @param {CanvasRenderingContext2D} context
 * @param {App} app
 * @param {Box} from
 * @param {Box} to
 */
function paintArrow(context, { theme }, from, to) {
  const startX = from.left + from.width / 2;
  const startY = from.top + from.height / 2;
  const endX = to.left + to.width / 2;
  const endY = to.top + to.height / 2;
  const length = Math.hypot(endX - startX, endY - startY) || 1;
  const bend = Math.min(0.35, 0.12 + from.height / length);
  const middleX = (startX + endX) / 2 + (endY - startY) * bend;
  const middleY = (startY + endY) / 2 - (endX - startX) * bend;
  const last = Math.hypot(endX - middleX, endY - middleY) || 1;
  const dirX = (endX - middleX) / last;
  const dirY = (endY - middleY) / last;
  const tip = Math.max(5, Math.min(9, to.height * 0.3));
  const neckX = endX - dirX * tip;
  const neckY = endY - dirY * tip;
  const draw = (/** @type {string} */ color, /** @type {number} */ lineWidth) => {
    context.strokeStyle = color;
    context.fillStyle = color;
    context.lineWidth = lineWidth;
    context.beginPath();
    context.moveTo(startX, startY);
    context.quadraticCurveTo(middleX, middleY, neckX, neckY);
    context.stroke();
    context.beginPath();
    context.moveTo(endX, endY);
    context.lineTo(neckX - dirY * tip * 0.5, neckY + dirX * tip * 0.5);
    context.lineTo(neckX + dirY * tip * 0.5, neckY - dirX * tip * 0.5);
    context.closePath();
    context.fill();
  };
  draw(theme.halo, 4);
  draw(theme.mark, 1.8);
}
