// What all our plots of plotly.js have in common.
// @ts-check

/** @import { FrameView, PlotAxis, Theme } from "./page.js" */

export const PLOTLY_CONFIG = {
  displaylogo: false,
  displayModeBar: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  showTips: false,
  doubleClick: false,
  responsive: false,
};
/** A figure without points: its axes are all that is wanted. */
export const NO_TRACES = [
  { type: "scatter", mode: "markers", x: [null], y: [null], marker: { opacity: 0 }, hoverinfo: "none" },
];

/**
 * Joins what all axes have and what one has; sizes of type follow the scale.
 * @param {PlotAxis} all
 * @param {PlotAxis} one
 * @param {number} scale
 */
function axisOf(all, one, scale) {
  /** @param {{ size?: number } | undefined} font */
  const scaled = (font) => (font?.size ? { ...font, size: font.size * scale } : font);
  const title = { ...all.title, ...one.title };
  /** @type {PlotAxis} */
  const axis = { ...all, ...one, title: { ...title, font: scaled(title.font) } };
  if (axis.tickfont) axis.tickfont = scaled(axis.tickfont);
  return axis;
}

/**
 * The layout of a view's plot: transparent, with thin axes; sizes of type and margins follow the theme's scale.
 * @param {FrameView} view
 * @param {Theme} theme
 */
export function plotLayout(view, theme) {
  const axis = {
    showgrid: false,
    zeroline: false,
    ticks: "outside",
    ticklen: 3,
    tickcolor: theme.line,
    linecolor: theme.line,
    showline: true,
    color: theme.mute,
    title: { font: { size: 11, color: theme.mute }, standoff: 4 },
  };
  const own = view.layout(theme);
  const { scale } = theme;
  /** @type {Record<string, number>} */
  const margin = { l: 58, r: 10, t: 4, b: 32, ...own.margin };
  for (const side in margin) margin[side] *= scale;
  return {
    ...own,
    autosize: true,
    margin,
    plot_bgcolor: "rgba(0,0,0,0)",
    paper_bgcolor: "rgba(0,0,0,0)",
    font: { family: theme.font, size: 11 * scale, color: theme.mute },
    showlegend: false,
    hovermode: false,
    dragmode: "pan",
    uirevision: "keep",
    xaxis: axisOf(axis, own.xaxis, scale),
    yaxis: axisOf(axis, own.yaxis, scale),
  };
}
