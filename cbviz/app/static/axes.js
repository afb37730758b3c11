// Draws the axes and lines of a `Frame` as SVG. Stands in for plotly.js (1.5 MB packed) where a page must stay small: the player that a notebook keeps.
// It knows what our figures use, no more: linear and log axes, ticks, titles, lines and markers, a second y axis, pan, zoom.
// @ts-check
import { SvgFigure } from "./svgfigure.js";

/** @import { PlotlyElement, PlotlyLibrary } from "./page.js" */
/** @import { FigureLayout, FigureTrace } from "./svgfigure.js" */

/** @typedef {Record<string, unknown[]>} Columns values of traces, by their name: one a trace */

/** @type {WeakMap<HTMLElement, SvgFigure>} */
const figures = new WeakMap();

/**
 * Sets values of traces.
 * @param {SvgFigure | undefined} figure
 * @param {object} columns
 */
function setColumns(figure, columns) {
  for (const [name, values] of Object.entries(/** @type {Columns} */ (columns))) {
    figure?.data.forEach((trace, i) => Object.assign(trace, { [name]: values[i] }));
  }
}

/**
 * The part of plotly's interface that our figures call.
 * @type {PlotlyLibrary}
 */
export const Axes = {
  async newPlot(host, data, layout, config) {
    const figure = new SvgFigure(
      /** @type {PlotlyElement} */ (host),
      /** @type {FigureTrace[]} */ (data),
      /** @type {FigureLayout} */ (layout),
      config,
    );
    figures.set(host, figure);
  },
  async react(host, data, layout) {
    const figure = figures.get(host);
    if (!figure) return;
    figure.data = /** @type {FigureTrace[]} */ (data);
    figure.layout = /** @type {FigureLayout} */ (layout);
    figure.draw();
  },
  async relayout(host, updates) {
    const figure = figures.get(host);
    figure?.change(updates);
    figure?.emit("plotly_relayout");
  },
  async restyle(host, columns) {
    const figure = figures.get(host);
    setColumns(figure, columns);
    figure?.draw();
  },
  async update(host, columns, updates) {
    const figure = figures.get(host);
    setColumns(figure, columns);
    figure?.change(updates);
  },
  async extendTraces(host, columns, indices, most) {
    const figure = figures.get(host);
    if (!figure) return;
    const { x, y } = /** @type {{ x: number[][], y: (number | null)[][] }} */ (columns);
    indices.forEach((index, i) => {
      const trace = figure.data[index];
      trace.x = [...trace.x, ...x[i]].slice(-most);
      trace.y = [...trace.y, ...y[i]].slice(-most);
    });
    figure.draw();
  },
  purge(host) {
    figures.delete(host);
    host.replaceChildren();
  },
  Plots: {
    resize(host) {
      figures.get(host)?.draw();
    },
  },
};
