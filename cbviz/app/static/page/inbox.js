// What comes from the kernel, one message after the other, and which part of the page it is for.
// @ts-check
import { PolicyBox } from "../classroom.js";
import { element } from "../dom.js";
import { Run, namedBuffers } from "../store.js";
import { Views } from "./views.js";

/** @import { AloneView } from "../alone.js" */
/** @import { BranchMenu } from "../branches.js" */
/** @import { BreakMenu } from "../breaks.js" */
/** @import { Controls } from "../controls.js" */
/** @import { ForkForm } from "../forkform.js" */
/** @import { Family, FromKernel, Live, Picture, Said, SaveMessage, Stop } from "../messages.js" */
/** @import { Notices } from "../notices.js" */
/** @import { PlotlyLibrary, WordPanel } from "../page.js" */
/** @import { PromptBox } from "../promptbox.js" */
/** @import { Address } from "./address.js" */
/** @import { Banner } from "./banner.js" */
/** @import { Comparison } from "./comparison.js" */
/** @import { Header } from "./header.js" */
/** @import { Layout } from "./layout.js" */
/** @import { Legends } from "./legends.js" */
/** @import { Painter } from "./painter.js" */
/** @import { App } from "./state.js" */
/** @import { Transport } from "./transport.js" */
/** @import { UtilisationPanel } from "./utilisation.js" */

/** @typedef {DataView<ArrayBuffer>[]} RawBuffers */

/**
 * The parts of the page that messages are for.
 * @typedef {{
 *   Plotly: PlotlyLibrary, layout: Layout, header: Header, transport: Transport, banner: Banner, notices: Notices,
 *   utilisation: UtilisationPanel, legends: Legends, painter: Painter, address: Address,
 *   controls: Controls, promptBox: PromptBox, why: WordPanel, metrics: WordPanel,
 *   fork: ForkForm, branchMenu: BranchMenu, breaks: BreakMenu, comparison: Comparison, alone: AloneView,
 *   drawHead: () => void,
 * }} InboxParts
 */

/** Milliseconds that a download has to begin. */
const KEEP_DOWNLOAD = 10000;

export class Inbox {
  /**
   * @param {App} app
   * @param {InboxParts} parts
   */
  constructor(app, parts) {
    this.app = app;
    this.parts = parts;
    this.dead = false;
    /** @type {PolicyBox | null} */
    this.policyBox = null;
    /** The messages so far: each one waits until those before it are worked off. */
    this.queue = Promise.resolve();
  }

  /**
   * @param {FromKernel} message
   * @param {RawBuffers} buffers
   */
  receive(message, buffers) {
    if (message.type === "here") {
      // At once: the kernel asks whether this page is still there.
      this.app.kernel.post({ type: "here", n: message.n });
      return;
    }
    this.queue = this.queue
      .then(() => (this.dead ? undefined : this.handle(message, buffers)))
      .catch((error) => {
        console.error(error);
        this.app.kernel.post({ type: "error", msg: String((error && error.stack) || error) });
      });
  }

  /**
   * @param {FromKernel} message
   * @param {RawBuffers} buffers
   * @returns {void | Promise<void>}
   */
  handle(message, buffers) {
    const { app, parts } = this;
    switch (message.type) {
      case "picture":
        return this.picture(message, buffers);
      case "live":
        this.showLive(message.live);
        return parts.address.update();
      case "said":
        return this.said(message);
      case "controls":
        return parts.controls.show(message);
      case "clear":
        return parts.controls.clearErrors();
      case "why":
        app.why = message;
        return this.redraw(parts.why, parts.metrics);
      case "metrics":
        app.metrics = message;
        return this.redraw(parts.metrics);
      case "account":
        app.account = message;
        return this.redraw(parts.utilisation.account);
      case "inside":
        app.inside = message;
        return this.redraw(parts.utilisation.inside);
      case "stop":
        return this.stopped(message);
      case "family":
        return this.family(message);
      case "forkform":
        return parts.fork.show(message);
      case "breaks":
        parts.transport.breakButton.hidden = false;
        return parts.breaks.show(message);
      case "files":
        return parts.comparison.panel.saved(message);
      case "compared":
        return parts.comparison.panel.compared(message);
      case "comparedrun":
        return parts.comparison.panel.comparedRun(message, buffers);
      case "alone":
        return parts.alone.show(message);
      case "save":
        return this.save(message, buffers[0]);
      default:
        return undefined;
    }
  }

  /** @param {...WordPanel} panels */
  redraw(...panels) {
    if (!this.app.current) return;
    for (const panel of panels) panel.draw();
  }

  // pictures -------------------------------------------------------------------------------------------------

  /**
   * @param {Picture} head
   * @param {RawBuffers} buffers
   */
  async picture(head, buffers) {
    const { app, parts } = this;
    if (!head.reset && !app.current) return;
    app.kernel.received(head.seq);
    if (head.live) app.live = head.live;
    if (head.reset) await this.restart(head, buffers);
    else app.run.apply(head, namedBuffers(head, buffers));
    parts.legends.update();
    parts.promptBox.update(app.run);
    parts.painter.pictureCame(!!head.reset);
    if (document.hidden) app.kernel.acknowledge();
    else app.markDirty();
    parts.address.update();
  }

  /**
   * Another run. A request of the same id stays picked.
   * @param {Picture} head
   * @param {RawBuffers} buffers
   */
  async restart(head, buffers) {
    const { app, parts } = this;
    const picked = app.selected >= 0 ? app.run.id(app.selected) : null;
    const run = new Run(head);
    run.apply(head, namedBuffers(head, buffers));
    app.why = null;
    app.metrics = null;
    app.account = null;
    app.inside = null;
    app.current = run;
    app.selected = picked === null ? -1 : (run.index.get(picked) ?? -1);
    await this.renewViews();
    parts.utilisation.restart();
    const { subtitle } = parts.layout.panels.tokens;
    subtitle.textContent = run.meta.missing.texts || "";
  }

  async renewViews() {
    const { app, parts } = this;
    if (app.views?.key === Views.keyOf(app)) {
      app.views.timeline.restart();
      return;
    }
    app.views?.destroy();
    app.views = null;
    parts.layout.loading.hidden = true;
    const views = new Views(
      parts.Plotly,
      {
        timeline: parts.layout.panels.timeline.body,
        blocks: parts.layout.blocksHost,
        series: parts.utilisation.seriesHost,
        roofline: parts.utilisation.roofHost,
      },
      app,
    );
    await views.init(app.theme);
    app.views = views;
  }

  // the session ----------------------------------------------------------------------------------------------

  /** @param {Live} news */
  showLive(news) {
    const { app, parts } = this;
    app.live = { ...app.live, ...news };
    const { live } = app;
    const { root } = parts.layout;
    root.classList.toggle("cb-playing", !!live.playing);
    root.setAttribute("aria-busy", String(!!live.loading));
    parts.transport.showLive(live);
    parts.notices.show(live.notices || []);
    parts.controls.lesson.hidden = live.run === undefined;
    parts.controls.lesson.disabled = !!live.loading;
    if (live.allow_code && !this.policyBox) {
      this.policyBox = new PolicyBox(parts.layout.addSidePanel("policybox", "Your policy").body, app);
    }
    parts.promptBox.showLive(live);
    parts.banner.show(live);
    parts.utilisation.showLive(live);
    if (!app.current) parts.layout.showLoading(live.loading || "");
    parts.drawHead();
    if (app.current && app.views?.timeline.lacksRows) {
      parts.painter.pictureCame(false);
      app.markDirty();
    }
  }

  /** @param {string | undefined} error */
  showError(error) {
    this.showLive({ banner: error, bad: true });
  }

  /** @param {Family} message */
  family(message) {
    const { app, parts } = this;
    parts.header.branchButton.hidden = false;
    parts.utilisation.accountTab.hidden = false;
    parts.transport.showFamily();
    app.canRewind = !app.live.recording;
    app.branch = message.name;
    parts.branchMenu.show(message);
    parts.comparison.panel.family(message);
    parts.drawHead();
  }

  /** @param {Stop} message */
  stopped(message) {
    const { app, parts } = this;
    app.stop = message.step < 0 ? null : message;
    if (app.stop) app.say(`Stopped at step ${app.stop.text.replace(/^Step /, "")}`);
    if (!app.current) return;
    parts.drawHead();
    parts.why.draw();
  }

  /**
   * A recording to download.
   * @param {SaveMessage} message
   * @param {DataView<ArrayBuffer>} content
   */
  save({ name }, content) {
    const url = URL.createObjectURL(new Blob([content], { type: "application/gzip" }));
    const link = element("a", { href: url, download: name });
    this.parts.layout.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), KEEP_DOWNLOAD);
    this.app.say(`Saved ${name}`);
  }

  // answers --------------------------------------------------------------------------------------------------

  /**
   * An error or a confirmation, put where it belongs; an error that belongs nowhere goes to the banner.
   * @param {Said} answer
   */
  said(answer) {
    if (this.saidWhereAsked(answer)) return;
    const { field, error } = answer;
    if (field && this.parts.controls.showError(field, error || "")) return;
    if (error) this.showError(error);
  }

  /**
   * @param {Said} answer
   * @returns {boolean} false: no part of the page has taken it
   */
  saidWhereAsked(answer) {
    const { app, parts } = this;
    const { cmd, error, id = "" } = answer;
    switch (cmd) {
      case "policy":
        this.policyBox?.answer(answer);
        return !!this.policyBox;
      case "add":
        if (error) {
          parts.promptBox.showError(error);
        } else {
          parts.promptBox.added(id);
          app.added = id;
        }
        return true;
      case "fork":
      case "forkform":
        parts.fork.said(answer);
        return true;
      case "compare":
        parts.comparison.panel.said(answer);
        return true;
      case "finish":
        if (!error && parts.comparison.open) parts.comparison.panel.ask();
        return !error;
      case "break":
      case "watch":
      case "run-on":
      case "run-back":
        return parts.breaks.said(answer);
      case "rename":
      case "drop":
        return parts.branchMenu.said(answer);
      case "abort":
        app.say(error || `${id} will be aborted before the next step`);
        return true;
      default:
        return false;
    }
  }
}
