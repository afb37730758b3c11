// What lies over the timeline: the cursor, the picked request, the cell under the mouse.
// @ts-check

/** @import { App } from "./page/state.js" */
/** @import { Geometry } from "./page.js" */

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 * @param {{ row: number, step: number } | null} hovered
 */
export function paintTimelineOver(context, geometry, app, hovered) {
  const { selected } = app;
  context.save();
  context.beginPath();
  context.rect(geometry.left - 6, geometry.top, geometry.width + 6, geometry.height);
  context.clip();
  paintFuture(context, geometry, app);
  if (selected >= 0) paintSelected(context, geometry, app);
  paintCursor(context, geometry, app);
  if (hovered) paintHovered(context, geometry, app, hovered);
  context.restore();
}

/**
 * @param {Geometry} geometry
 * @param {number} step
 */
function stepX(geometry, step) {
  return geometry.left + (step - geometry.x0) * geometry.perX;
}

/**
 * @param {Geometry} geometry
 * @param {number} row
 */
function rowY(geometry, row) {
  return geometry.top + (row - geometry.y0) * geometry.perY;
}

/**
 * What is recorded, but later than the cursor, is paler.
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 */
function paintFuture(context, geometry, { run, theme }) {
  const now = stepX(geometry, run.step + 0.5);
  const end = stepX(geometry, run.steps + 0.5);
  if (end <= now) return;
  context.fillStyle = theme.bg;
  context.globalAlpha = 0.62;
  context.fillRect(now, geometry.top, end - now, geometry.height);
  context.globalAlpha = 1;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 */
function paintSelected(context, geometry, { selected: row, theme }) {
  const height = Math.max(4, geometry.perY);
  const top = rowY(geometry, row) - height / 2;
  context.lineJoin = "round";
  context.strokeStyle = theme.halo;
  context.lineWidth = 4;
  context.strokeRect(geometry.left - 4, top, geometry.width + 8, height);
  context.strokeStyle = theme.accent;
  context.lineWidth = 2;
  context.strokeRect(geometry.left - 4, top, geometry.width + 8, height);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 */
function paintCursor(context, geometry, { run, theme }) {
  const { top, height, perX } = geometry;
  const now = stepX(geometry, run.step + 0.5);
  if (now < geometry.left - 1) return;
  context.fillStyle = theme.accent;
  if (run.step > 0 && perX > 3) {
    context.globalAlpha = 0.12;
    context.fillRect(stepX(geometry, run.step - 0.5), top, perX, height);
    context.globalAlpha = 1;
  }
  context.fillRect(Math.round(now) - 0.75, top, 1.5, height);
  context.beginPath();
  context.moveTo(now - 5, top);
  context.lineTo(now + 5, top);
  context.lineTo(now, top + 6);
  context.fill();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Geometry} geometry
 * @param {App} app
 * @param {{ row: number, step: number }} cell
 */
function paintHovered(context, geometry, { theme }, { row, step }) {
  const width = Math.max(5, geometry.perX);
  const height = Math.max(5, geometry.perY);
  const left = stepX(geometry, step) - width / 2;
  const top = rowY(geometry, row) - height / 2;
  context.strokeStyle = theme.halo;
  context.lineWidth = 3.5;
  context.strokeRect(left, top, width, height);
  context.strokeStyle = theme.fg;
  context.lineWidth = 1.5;
  context.strokeRect(left, top, width, height);
}
