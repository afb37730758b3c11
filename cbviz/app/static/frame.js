// A transparent Plotly figure that owns axes, zoom and pan, exactly over a canvas ("under") and below another one ("over").
// @ts-check
import { NO_TRACES, PLOTLY_CONFIG, plotLayout } from "./plotlayout.js";
import { contextOf, element } from "./dom.js";

/** @import { FrameView, Geometry, Place, PlotlyElement, PlotlyLibrary, Relayout, Theme } from "./page.js" */

const CLICK_PX = 4;
const CLICK_MS = 600;
const RESIZE_MS = 30;

export class Frame {
  /**
   * @param {PlotlyLibrary} Plotly
   * @param {HTMLElement} host
   * @param {FrameView} view
   */
  constructor(Plotly, host, view) {
    this.Plotly = Plotly;
    this.view = view;
    this.dead = false;
    this.underDirty = true;
    this.overDirty = true;
    /** The canvas below has another size or other colours: it is painted whole. */
    this.fresh = true;
    /** @type {(() => void)[]} */
    this.listeners = [];
    this.root = element("div", {
      style: "position:absolute;inset:0;outline-offset:-2px",
      tabindex: "0",
      role: "application",
      "aria-roledescription": view.role,
      "aria-label": view.label,
      "data-lm-suppress-shortcuts": "true",
      class: "cb-frame",
    });
    this.under = element("canvas", {
      style: "position:absolute;image-rendering:pixelated",
      role: "img",
      "aria-label": view.label,
    });
    this.plot = /** @type {PlotlyElement} */ (
      /** @type {HTMLElement} */ (element("div", { style: "position:absolute;inset:0" }))
    );
    this.over = element("canvas", {
      style: "position:absolute;left:0;top:0;pointer-events:none",
      "aria-hidden": "true",
    });
    this.tip = element("div", { "aria-hidden": "true", class: "cb-tip" });
    this.root.append(this.under, this.plot, this.over, this.tip);
    host.append(this.root);
    this.underContext = contextOf(this.under);
    this.overContext = contextOf(this.over);
    /** The pixels of the canvas below, for views that paint pixel by pixel. */
    this.image = new ImageData(1, 1);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.underStyle = "";
    // The plot's size is remembered: reading it in a frame would force a layout.
    this.frameWidth = 0;
    this.frameHeight = 0;
    this.resizeTimer = 0;
    this.sizes = new ResizeObserver(() => this.resize());
  }

  /** @param {Theme} theme */
  async init(theme) {
    this.theme = theme;
    const traces = this.view.traces?.(theme) ?? NO_TRACES;
    const config = { ...PLOTLY_CONFIG, scrollZoom: !!this.view.scroll };
    await this.Plotly.newPlot(this.plot, traces, plotLayout(this.view, theme), config);
    if (this.dead) return;
    this.listenToPlotly();
    this.listenToMouse();
    this.listenToFocus();
    this.frameWidth = this.plot.clientWidth;
    this.frameHeight = this.plot.clientHeight;
    this.sizes.observe(this.root);
    this.watchPixelRatio();
    this.repaint();
  }

  /**
   * Listens until the frame is destroyed.
   * @template {Event} Kind
   * @param {EventTarget} target
   * @param {string} event
   * @param {(event: Kind) => void} listener
   * @param {boolean} [capture]
   */
  listen(target, event, listener, capture = false) {
    const plain = /** @type {EventListener} */ (/** @type {unknown} */ (listener));
    target.addEventListener(event, plain, capture);
    this.listeners.push(() => target.removeEventListener(event, plain, capture));
  }

  listenToPlotly() {
    this.plot.on("plotly_relayouting", () => {
      this.repaint();
      this.hideTip();
    });
    this.plot.on("plotly_relayout", () => {
      this.repaint();
      this.view.moved?.(this);
    });
    this.plot.on("plotly_afterplot", () => this.repaint());
    this.plot.on("plotly_doubleclick", () => this.fit());
  }

  /** Hover and click are our own, from the mouse position: a drag makes Plotly put a cover over the page, so a click is told from down and up. */
  listenToMouse() {
    /** @type {MouseEvent | null} */
    let down = null;
    this.listen(this.plot, "mousemove", (/** @type {MouseEvent} */ event) => {
      if (!event.buttons) this.view.hover?.(this.pick(event));
    });
    this.listen(this.plot, "mouseleave", () => {
      this.hideTip();
      this.view.hover?.(null);
    });
    const press = (/** @type {MouseEvent} */ event) => {
      down = event;
    };
    const release = (/** @type {MouseEvent} */ event) => {
      const start = down;
      down = null;
      if (!start || event.detail >= 2) return;
      const moved = Math.hypot(event.clientX - start.clientX, event.clientY - start.clientY);
      if (moved >= CLICK_PX || event.timeStamp - start.timeStamp >= CLICK_MS) return;
      const place = this.pick(event);
      if (place) this.view.click?.(place);
    };
    this.listen(this.plot, "mousedown", press, true);
    this.listen(window, "mouseup", release, true);
  }

  listenToFocus() {
    this.listen(this.root, "keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.target !== this.root || !this.root.matches(":focus-visible")) return;
      if (!this.view.key?.(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    for (const event of ["focus", "blur"]) this.listen(this.root, event, () => this.repaintOver());
  }

  /** A window that moves to another screen, or a page that is zoomed, has another pixel ratio. */
  watchPixelRatio() {
    const changed = () => {
      if (this.dead) return;
      this.repaint();
      this.watchPixelRatio();
    };
    matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener("change", changed, { once: true });
  }

  resize() {
    this.frameWidth = this.plot.clientWidth;
    this.frameHeight = this.plot.clientHeight;
    if (this.dead || !this.frameWidth) return;
    clearTimeout(this.resizeTimer);
    this.resizeTimer = setTimeout(() => {
      if (this.dead) return;
      this.view.resized?.(this);
      this.Plotly.Plots.resize(this.plot);
    }, RESIZE_MS);
  }

  /** Both canvases, in the next animation frame. */
  repaint() {
    this.underDirty = true;
    this.repaintOver();
  }

  /** Only what lies over the plot: cursor, selection, hover. */
  repaintOver() {
    this.overDirty = true;
    this.view.markDirty();
  }

  /** Whether plotly has drawn its axes. */
  get ready() {
    return !this.dead && !!this.plot._fullLayout?._size;
  }

  /** What plotly has worked out; only when `ready`. */
  get plotted() {
    const layout = this.plot._fullLayout;
    if (!layout) throw new Error("plotly has not drawn this frame yet");
    return layout;
  }

  /**
   * The place under the mouse; null outside the plot's area.
   * @param {MouseEvent} event
   * @returns {Place | null}
   */
  pick(event) {
    const box = this.plot.getBoundingClientRect();
    const { _size: area, xaxis, yaxis } = this.plotted;
    const px = (event.clientX - box.left) * (this.plot.clientWidth / box.width) - area.l;
    const py = (event.clientY - box.top) * (this.plot.clientHeight / box.height) - area.t;
    if (px < 0 || py < 0 || px > area.w || py > area.h) return null;
    return { x: xaxis.p2d(px), y: yaxis.p2d(py), px: px + area.l, py: py + area.t };
  }

  /**
   * Where the plot's area lies. Its edges are whole device pixels, so that the canvas is never blurred and lies exactly under it.
   * @returns {Geometry}
   */
  geometry() {
    const { _size: area, xaxis, yaxis } = this.plotted;
    const ratio = window.devicePixelRatio || 1;
    const deviceLeft = Math.round(area.l * ratio);
    const deviceTop = Math.round(area.t * ratio);
    const [x0, x1] = xaxis.range;
    const [y1, y0] = yaxis.range;
    return {
      ratio,
      deviceLeft,
      deviceTop,
      deviceWidth: Math.max(1, Math.round((area.l + area.w) * ratio) - deviceLeft),
      deviceHeight: Math.max(1, Math.round((area.t + area.h) * ratio) - deviceTop),
      left: area.l,
      top: area.t,
      width: area.w,
      height: area.h,
      frameWidth: this.frameWidth,
      frameHeight: this.frameHeight,
      x0: Number(x0),
      x1: Number(x1),
      y0: Number(y0),
      y1: Number(y1),
      perX: area.w / (x1 - x0),
      perY: area.h / (y1 - y0),
    };
  }

  /** Paints what is due. Called from the page's single requestAnimationFrame; true if something was painted. */
  flush() {
    if (!this.ready || !(this.underDirty || this.overDirty) || !this.frameWidth) return false;
    const geometry = this.geometry();
    if (this.underDirty) {
      if (this.view.paint) this.paintUnder(geometry);
      this.underDirty = false;
    }
    this.paintOver(geometry);
    return true;
  }

  /** @param {Geometry} geometry */
  paintUnder(geometry) {
    const canvas = this.under;
    const { ratio, deviceLeft, deviceTop, deviceWidth, deviceHeight } = geometry;
    if (canvas.width !== deviceWidth || canvas.height !== deviceHeight) {
      canvas.width = deviceWidth;
      canvas.height = deviceHeight;
    }
    const style = [deviceLeft, deviceTop, deviceWidth, deviceHeight].map((size) => `${size / ratio}px`);
    if (this.underStyle !== style.join()) {
      this.underStyle = style.join();
      [canvas.style.left, canvas.style.top, canvas.style.width, canvas.style.height] = style;
    }
    if (this.image.width !== deviceWidth || this.image.height !== deviceHeight) {
      this.image = new ImageData(deviceWidth, deviceHeight);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.fresh = true;
    }
    this.view.paint?.(this, this.underContext, geometry);
    this.fresh = false;
  }

  /** @param {Geometry} geometry */
  paintOver(geometry) {
    const canvas = this.over;
    const context = this.overContext;
    const { ratio } = geometry;
    const width = Math.round(geometry.frameWidth * ratio);
    const height = Math.round(geometry.frameHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
    } else {
      context.clearRect(0, 0, width, height);
    }
    context.save();
    context.scale(ratio, ratio);
    this.view.paintOver(this, context, geometry);
    context.restore();
    this.overDirty = false;
  }

  /** @param {Relayout} ranges */
  setRange(ranges) {
    return this.Plotly.relayout(this.plot, ranges);
  }

  /** Shows everything. */
  fit() {
    if (!this.view.home) return;
    this.setRange(this.view.home());
    this.view.moved?.(this);
  }

  /** @param {Theme} theme */
  async retheme(theme) {
    this.theme = theme;
    if (!this.ready) return;
    const layout = plotLayout(this.view, theme);
    layout.xaxis.range = this.plotted.xaxis.range.slice();
    if (!layout.yaxis.autorange) layout.yaxis.range = this.plotted.yaxis.range.slice();
    this.view.restyle?.(this.plot.data, theme);
    await this.Plotly.react(this.plot, this.plot.data, layout);
    this.fresh = true;
    this.repaint();
  }

  /**
   * @param {Place} place
   * @param {string} text
   */
  showTip(place, text) {
    const { style } = this.tip;
    if (this.tip.textContent !== text) this.tip.textContent = text;
    style.display = "block";
    style.background = this.theme?.tip ?? "";
    style.color = this.theme?.tipfg ?? "";
    const right = place.px > this.plot.clientWidth * 0.55;
    const low = place.py > this.plot.clientHeight * 0.55;
    style.transform = `translate(${right ? "-100%" : "0"},${low ? "-100%" : "0"})`;
    style.left = `${place.px + (right ? -12 : 12)}px`;
    style.top = `${place.py + (low ? -10 : 12)}px`;
  }

  hideTip() {
    this.tip.style.display = "none";
  }

  destroy() {
    this.dead = true;
    clearTimeout(this.resizeTimer);
    for (const stop of this.listeners) stop();
    this.sizes.disconnect();
    this.Plotly.purge(this.plot);
    this.root.remove();
  }
}
