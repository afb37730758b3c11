// The whole page: builds its parts, gives them what they need, and starts the conversation with the kernel.
// The kernel sends a picture (`seq`); the page draws it in one animation frame and acknowledges at the frame's start.
// @ts-check
import { AloneView } from "./alone.js";
import { BatchBar, BatchPanel } from "./batch.js";
import { TablePanel } from "./blocktable.js";
import { BranchMenu } from "./branches.js";
import { BreakMenu } from "./breaks.js";
import { Controls } from "./controls.js";
import { element, icon, ICON } from "./dom.js";
import { KernelNotice } from "./ended.js";
import { ForkForm } from "./forkform.js";
import { HostStrip } from "./host.js";
import { MetricsPanel } from "./metrics.js";
import { Notices, watchLeaving } from "./notices.js";
import { Address } from "./page/address.js";
import { Appearance } from "./page/appearance.js";
import { Banner } from "./page/banner.js";
import { Comparison } from "./page/comparison.js";
import { Header } from "./page/header.js";
import { Inbox } from "./page/inbox.js";
import { KernelLine } from "./page/kernel.js";
import { Keyboard, KeysBox } from "./page/keys.js";
import { Layout } from "./page/layout.js";
import { Legends } from "./page/legends.js";
import { Painter } from "./page/painter.js";
import { App } from "./page/state.js";
import { exposeForTests } from "./page/testing.js";
import { Transport } from "./page/transport.js";
import { UtilisationPanel } from "./page/utilisation.js";
import { PromptBox } from "./promptbox.js";
import { QueuePanel } from "./queue.js";
import { TextPanel } from "./textpanel.js";
import { ownPage, readTheme } from "./theme.js";
import { WhyPanel } from "./why.js";

/** @import { Frame } from "./frame.js" */
/** @import { FromKernel, KernelModel } from "./messages.js" */
/** @import { PlotlyLibrary } from "./page.js" */

/**
 * A tool of a panel that shows everything again after a zoom.
 * @param {() => Frame | undefined} frame
 */
function fitButton(frame) {
  return element(
    "button",
    {
      type: "button",
      class: "cb-tool",
      title: "Show everything (double click)",
      "aria-label": "Show everything",
      onclick: () => frame()?.fit(),
    },
    icon(ICON.fit, 11),
  );
}

/**
 * The tools of the picked request.
 * @param {App} app
 */
function requestButtons(app) {
  const abort = element("button", {
    type: "button",
    class: "cb-btn cb-small cb-abort",
    text: "Abort",
    hidden: true,
    onclick: () => {
      if (app.selected >= 0) app.send("abort", { id: app.run.id(app.selected) });
    },
  });
  const alone = element("button", {
    type: "button",
    class: "cb-btn cb-small cb-alone-open",
    text: "Alone?",
    hidden: true,
    title: "Computes this request once more, without its batch-mates, and shows where its numbers differ",
  });
  return { abort, alone };
}

/**
 * @param {{ model: KernelModel, el: HTMLElement, Plotly: PlotlyLibrary }} given
 * @returns {Promise<() => void>} takes the page away again
 */
export async function render({ model, el, Plotly }) {
  const kernel = new KernelLine(model);
  const app = new App(kernel, readTheme(el, 1));

  // The parts of the page, from the outside in.
  const bar = new BatchBar(app);
  const legends = new Legends(app);
  const layout = new Layout(app, {
    resized: () => bar.markDirty(),
    enlarged: () => {
      utilisation.drawTitle();
      redraw();
    },
  });
  const { root, panels } = layout;
  const appearance = new Appearance(app, el, root, {
    painted: () => legends.draw(),
    changed: () => redraw(),
  });
  const { presenter, themeButton } = appearance;
  const keysBox = new KeysBox();
  const header = new Header(app, {
    themeButton,
    presentButton: presenter.button,
    help: () => keysBox.toggle(),
  });
  const transport = new Transport(app, () => comparison.toggle());
  const banner = new Banner(app);
  const notices = new Notices(app);
  root.append(header.node, transport.node, banner.node, notices.node, layout.main);
  root.append(app.announcer, keysBox.node);

  // What stands in the panels.
  const buttons = requestButtons(app);
  panels.timeline.addTools(
    legends.states,
    fitButton(() => app.views?.timeline.frame),
  );
  panels.blocks.addTools(fitButton(() => app.views?.blocks.frame));
  panels.table.addTools(buttons.alone, buttons.abort);
  const hostStrip = element("div", { class: "cb-hostmem", hidden: true });
  panels.blocks.node.append(hostStrip, legends.blocks);
  const controls = new Controls(panels.controls.body, app);
  const promptBox = new PromptBox(panels.promptbox.body, app);
  const utilisation = new UtilisationPanel(app, panels.util);
  const why = new WhyPanel(panels.why.body, app, panels.why.title);
  const metrics = new MetricsPanel(panels.metrics.body, app, panels.metrics.subtitle);
  const fork = new ForkForm(app, root, transport.forkButton);
  const branchMenu = new BranchMenu(app, root, header.branchButton);
  const breaks = new BreakMenu(app, root, transport.breakButton, transport.breakCount);
  const comparison = new Comparison(app, layout);
  comparison.opener = transport.compareButton;
  const alone = new AloneView(app, root, buttons.alone);

  // Painting.
  const drawHead = () => {
    if (app.live.title) header.drawTitle(app.live.title);
    if (!app.current) return;
    if (app.run.blocks.counts().reserved) legends.sawReserved();
    header.draw();
    transport.draw();
    layout.draw();
    utilisation.draw();
  };
  const painter = new Painter(app, bar, {
    head: drawHead,
    seriesShown: () => utilisation.showsSeries,
    words: [
      new QueuePanel(panels.queue.body, app),
      new TablePanel(panels.table.body, app, panels.table.title, buttons.abort),
      why,
      metrics,
      new TextPanel(panels.tokens.body, app),
      new BatchPanel(panels.batch.body, app, bar, panels.batch.subtitle),
      utilisation.account,
      new HostStrip(hostStrip, app),
      utilisation.experts,
      utilisation.inside,
      comparison.panel,
      alone,
    ],
  });
  const redraw = () => {
    bar.dirty = true;
    painter.paintWords();
    app.markDirty();
  };
  app.connect({ layout, painter, promptBox });

  // Onto the page.
  const kernelNotice = new KernelNotice(model, root, (reachable) => {
    kernel.reachable = reachable;
    root.classList.remove("cb-playing");
  });
  header.node.before(kernelNotice.bar);
  el.classList.add("cb-host");
  el.append(root);
  if (ownPage()) root.classList.add("cb-full");
  layout.sizes.observe(root);
  const keyboard = new Keyboard(app, {
    layout,
    transport,
    utilisation,
    comparison,
    presenter,
    promptBox,
    fork,
    breaks,
    alone,
    keysBox,
  });
  appearance.begin();

  // The conversation with the kernel.
  const address = new Address(app);
  const inbox = new Inbox(app, {
    Plotly,
    layout,
    header,
    transport,
    banner,
    notices,
    utilisation,
    legends,
    painter,
    address,
    controls,
    promptBox,
    why,
    metrics,
    fork,
    branchMenu,
    breaks,
    comparison,
    alone,
    drawHead,
  });
  /**
   * @param {FromKernel} message
   * @param {DataView<ArrayBuffer>[]} buffers
   */
  const receive = (message, buffers) => inbox.receive(message, buffers);
  const seen = () => {
    kernel.acknowledge();
    if (!document.hidden) app.markDirty();
  };
  document.addEventListener("visibilitychange", seen);
  model.on("msg:custom", receive);
  model.send({ type: "ready" });
  const stopWatchingLeaving = ownPage() ? watchLeaving(kernel) : () => {};
  exposeForTests(app, painter, inbox);

  return () => {
    inbox.dead = true;
    model.off("msg:custom", receive);
    document.removeEventListener("visibilitychange", seen);
    kernelNotice.destroy();
    stopWatchingLeaving();
    painter.destroy();
    address.destroy();
    appearance.destroy();
    keyboard.destroy();
    layout.sizes.disconnect();
    comparison.destroy();
    alone.destroy();
    app.popup?.close(false);
    bar.sizes.disconnect();
    app.views?.destroy();
    utilisation.destroy();
    root.remove();
  };
}
