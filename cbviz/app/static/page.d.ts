// What the parts of the page give each other: colours, geometry, the frame around a picture, plotly.js.
import type { Frame } from "./frame.js";

/** The colours of a theme, as written down in color.js. */
export interface Palette {
  dark: boolean;
  bg: string;
  page: string;
  fg: string;
  mute: string;
  line: string;
  track: string;
  accent: string;
  onAccent: string;
  halo: string;
  tip: string;
  tipfg: string;
  bad: string;
  hot: string;
  mark: string;
  /** By state: the colour, and that of its texture. */
  state: Record<string, string[]>;
  free: string;
  freeLine: string;
  ownerL: number[];
  ownerC: number;
  lines: string[];
}

/** Colours of requests, by row modulo 256: plain, tinted, of the number on them; as text and as pixels. */
export interface Owners {
  css: string[];
  tint: string[];
  ink: string[];
  pixels: Uint32Array;
  tintPixels: Uint32Array;
}

/** Pixels by rank of the state: its colour, and that of its texture. */
export interface StatePixels {
  plain: Uint32Array;
  texture: Uint32Array;
}

/** Single colours as pixels, for what is painted pixel by pixel. */
export interface GroundPixels {
  freePx: number;
  bgPx: number;
  fgPx: number;
  mutePx: number;
  markPx: number;
}

export interface Theme extends Palette, GroundPixels {
  font: string;
  states: StatePixels;
  owners: Owners;
  /** Size of type: 1, or more for a projector. */
  scale: number;
}

/** Data coordinates of the left, right, top and bottom edge. */
export interface Window {
  x0: number;
  x1: number;
  y0: number;
  y1: number;
}

/** Where a plot's area lies. Edges in data coordinates; sizes in CSS pixels, and in device pixels for the canvas under it. */
export interface Geometry extends Window {
  /** Device pixels a CSS pixel. */
  ratio: number;
  left: number;
  top: number;
  width: number;
  height: number;
  /** The whole frame. */
  frameWidth: number;
  frameHeight: number;
  /** CSS pixels a unit of x and of y. */
  perX: number;
  perY: number;
  deviceLeft: number;
  deviceTop: number;
  deviceWidth: number;
  deviceHeight: number;
}

/** A place under the mouse: in data coordinates, and in CSS pixels of the frame. */
export interface Place {
  x: number;
  y: number;
  px: number;
  py: number;
}

/** Ranges and other settings of a plot, by plotly's path. */
export type Relayout = Record<string, unknown>;

/** A figure's trace as plotly holds it: what we change of it. */
export interface Trace {
  line: { color: string };
  marker: { color: string };
  [key: string]: unknown;
}

export interface PlotlyAxis {
  range: [number, number];
  p2d(pixel: number): number;
}

/** The element that plotly draws into. */
export interface PlotlyElement extends HTMLElement {
  data: Trace[];
  on(event: string, listener: () => void): void;
  _fullLayout?: {
    _size: { l: number; t: number; w: number; h: number };
    xaxis: PlotlyAxis;
    yaxis: PlotlyAxis;
  };
}

export interface PlotlyLibrary {
  newPlot(element: HTMLElement, traces: object[], layout: object, config: object): Promise<unknown>;
  react(element: HTMLElement, traces: object[], layout: object): Promise<unknown>;
  relayout(element: HTMLElement, update: Relayout): Promise<unknown>;
  restyle(element: HTMLElement, update: object): Promise<unknown>;
  update(element: HTMLElement, traces: object, layout: Relayout): Promise<unknown>;
  extendTraces(element: HTMLElement, update: object, indices: number[], most: number): Promise<unknown>;
  purge(element: HTMLElement): void;
  Plots: { resize(element: HTMLElement): void };
}

/** A view inside a frame: what the frame asks of it. */
export interface FrameView {
  role: string;
  label: string;
  /** The wheel zooms. */
  scroll?: boolean;
  /** Figures that plotly draws; without them the view paints all itself. */
  traces?(theme: Theme): object[];
  layout(theme: Theme): PlotLayout;
  /** Paints the canvas under the plot, in device pixels. */
  paint?(frame: Frame, context: CanvasRenderingContext2D, geometry: Geometry): void;
  /** Paints the canvas over the plot, in CSS pixels. */
  paintOver(frame: Frame, context: CanvasRenderingContext2D, geometry: Geometry): void;
  hover?(place: Place | null): void;
  click?(place: Place): void;
  /** True: the key was for this view. */
  key?(event: KeyboardEvent): boolean;
  /** Ranges that show everything. */
  home?(): Relayout;
  /** The user has zoomed or panned. */
  moved?(frame: Frame): void;
  resized?(frame: Frame): void;
  restyle?(data: Trace[], theme: Theme): void;
  /** Asks for an animation frame. */
  markDirty(): void;
}

export interface PlotAxis {
  title?: { text?: string; standoff?: number; font?: { size?: number; color?: string } };
  tickfont?: { size?: number };
  range?: unknown;
  autorange?: boolean;
  [key: string]: unknown;
}

export interface PlotLayout {
  margin?: Record<string, number>;
  xaxis: PlotAxis;
  yaxis: PlotAxis;
  [key: string]: unknown;
}

/** A part of the page made of words: drawn after each picture, as often as words can be read. */
export interface WordPanel {
  draw(): void;
}
