// render({ model, el, Plotly }): the whole page. `model` needs only send/on/off of the anywidget interface.
// Messages: the kernel sends a picture (`seq`), the page draws it in one animation frame and acknowledges at the frame's start.
import { Run, Timeline } from "./store.js";
import { STATES, STATE_TEXT } from "./color.js";
import { sig, percent } from "./format.js";
import { readTheme, watchTheme, chooseTheme, ownPage } from "./theme.js";
import { paintTimeline } from "./raster.js";
import { TimelineView } from "./timeline.js";
import { BlockView } from "./blockmap.js";
import { SeriesView } from "./series.js";
import { RoofView } from "./roofline.js";
import { InsidePanel } from "./inside.js";
import { BatchBar } from "./batch.js";
import { QueuePanel, TablePanel, WhyPanel, MetricsPanel, TextPanel, BatchPanel } from "./panels.js";
import { Controls, PromptBox } from "./controls.js";
import { ForkForm, BranchMenu } from "./branches.js";
import { BreakMenu } from "./breaks.js";
import { ComparePanel } from "./compare.js";
import { AloneView } from "./alone.js";
import { HostStrip } from "./host.js";
import { AccountPanel } from "./account.js";
import { ExpertPanel } from "./experts.js";
import { Presenter, PolicyBox } from "./classroom.js";
import { Notices, watchLeaving } from "./notices.js";
import { KernelNotice } from "./ended.js";
import { isolated } from "./texts.js";
import { h, icon, ICON, setText, setAttr } from "./dom.js";
const KEYS = [
  ["Space", "play or pause"],
  ["→", "one step on (a recorded one, or a new one)"],
  ["←", "one step back"],
  [". and ,", "one event on or back, inside the step"],
  ["Home, End", "first or last recorded step"],
  ["↑ ↓", "in the timeline: the request above or below"],
  ["/", "to the prompt box"],
  ["Shift F, B, C", "fork here, breakpoints, compare"],
  ["Shift N, L", "on to the next stop, back to the last one"],
  ["Shift R", "rewind the engine to this step"],
  ["Shift A", "accounts in place of utilisation"],
  ["Shift X", "a mixture's experts in place of utilisation"],
  ["Shift U, I", "the roofline, or the inside of a step, in place of utilisation"],
  ["P", "large type for a projector, and back"],
  ["Esc", "drop the selection, close what is open"],
  ["?", "this list"],
];
const SPEEDS = [
  ["1", "1 step/s"],
  ["2", "2 steps/s"],
  ["5", "5 steps/s"],
  ["10", "10 steps/s"],
  ["30", "30 steps/s"],
  ["0", "full speed"],
];

export async function render({ model, el, Plotly }) {
  const app = {
    R: null,
    th: readTheme(el),
    sel: -1,
    why: null,
    metrics: null,
    account: null,
    stop: null,
    asked: null,
    popup: null,
    live: {},
    frames: 0,
  };
  let policyBox = null;
  let raf = 0;
  let lastSeq = 0;
  let ackDue = false;
  let dead = false;
  let views = null;
  let domAt = 0;
  let domTimer = 0;
  let sumAt = 0;
  let sumTimer = 0;
  let sayTimer = 0;
  let seekTo = null;
  let kernelThere = true;
  const post = (message) => {
    if (kernelThere) model.send(message);
  };
  app.send = (cmd, more = {}) => post({ type: "cmd", cmd, ...more });
  app.dirty = () => {
    if (!raf && !dead) raf = requestAnimationFrame(flush);
  };
  app.numRequests = () => app.live.num_requests || 0;

  // the page -----------------------------------------------------------------------------------------------------------
  const live = h("div", { class: "cb-sr", role: "status", "aria-live": "polite" });
  app.say = (s) => {
    clearTimeout(sayTimer);
    sayTimer = setTimeout(() => setText(live, s), 120);
  };
  const button = (cls, ic, text, title, cmd, shown = false) =>
    h(
      "button",
      {
        type: "button",
        class: `cb-btn ${cls}${shown ? "" : " cb-only"}`,
        title,
        "aria-label": text,
        onclick: cmd,
      },
      icon(ICON[ic]),
      shown ? h("span", { text }) : null,
    );
  const title = h("span", { class: "cb-what" });
  const st = {
    step: h("b", { text: "step 0" }),
    of: h("span", { class: "cb-dim" }),
    req: h("span", { text: "requests 0/0" }),
    rate: h("span"),
    kv: h("span"),
    stop: h("span", { class: "cb-stopped", hidden: true }),
  };
  const status = h(
    "div",
    { class: "cb-status" },
    h("span", {}, st.step, st.of),
    st.stop,
    st.req,
    st.rate,
    st.kv,
  );
  const branchButton = h("button", { type: "button", class: "cb-btn cb-branch", hidden: true });
  const themeButton = h("button", {
    type: "button",
    class: "cb-btn cb-theme",
    onclick: () => {
      const v = app.th.dark ? "light" : "dark";
      chooseTheme(v);
      retheme();
    },
  });
  const header = h(
    "header",
    { class: "cb-head" },
    h("strong", { class: "cb-brand", text: "cbviz" }),
    title,
    branchButton,
    h("span", { class: "cb-grow" }),
    status,
    themeButton,
    h("button", {
      type: "button",
      class: "cb-btn cb-only cb-help",
      title: "Keyboard shortcuts (?)",
      "aria-label": "Keyboard shortcuts",
      text: "?",
      onclick: () => help(),
    }),
  );
  const scrub = h("input", {
    type: "range",
    class: "cb-scrub",
    min: 0,
    max: 0,
    value: 0,
    "aria-label": "Step",
    oninput: () => app.seek(Number(scrub.value)),
  });
  const speed = h(
    "select",
    {
      class: "cb-speed",
      "aria-label": "Speed of play",
      onchange: () => app.send("speed", { value: Number(speed.value) }),
    },
    ...SPEEDS.map(([v, t]) => h("option", { value: v, text: t, selected: v === "10" })),
  );
  const playButton = button("cb-play", "play", "Play", "Play (Space)", () => app.send("play"), true);
  const stepButton = button("cb-step cb-primary", "step", "Step", "One step (→)", () => app.step(), true);
  const later = (b) => {
    b.hidden = true;
    return b;
  };
  const forkButton = later(
    button(
      "cb-fork",
      "branch",
      "Fork",
      "Fork: a branch from this step with something changed (Shift F)",
      () => {},
      true,
    ),
  );
  const breakButton = later(
    button("cb-break", "stop", "Break", "Breakpoints and watches (Shift B)", () => {}, true),
  );
  const compareButton = later(
    button(
      "cb-compare-open",
      "sides",
      "Compare",
      "Compare branches and saved runs (Shift C)",
      () => compareShow(!compare.open),
      true,
    ),
  );
  const rewindButton = later(
    button(
      "cb-rewind",
      "rewind",
      "Rewind here",
      "Take the engine back to this step; what comes later is kept as a branch (Shift R)",
      () => app.send("rewind", { step: app.R.step }),
      true,
    ),
  ); // shown once the kernel says that it can
  breakButton._count = h("em", { class: "cb-count", hidden: true });
  breakButton.append(breakButton._count);
  compareButton.setAttribute("aria-expanded", "false");
  const transport = h(
    "div",
    { class: "cb-transport", role: "toolbar", "aria-label": "Transport" },
    button("cb-reset", "reset", "Restart from step 0", "Restart: step 0, same workload, same settings", () =>
      app.send("reset"),
    ),
    button("cb-back", "back", "One recorded step back", "One step back (←)", () => app.send("back")),
    stepButton,
    playButton,
    button("cb-pause", "pause", "Pause", "Pause (Space)", () => app.send("pause"), true),
    button("cb-end", "end", "Last recorded step", "Last recorded step (End)", () => app.send("end")),
    h(
      "span",
      { class: "cb-substeps" },
      button("cb-event-back", "before", "One event back", "One event back, inside the step (,)", () =>
        app.send("event", { by: -1 }),
      ),
      button("cb-event-on", "on", "One event on", "One event on, inside the step (.)", () =>
        app.send("event", { by: 1 }),
      ),
    ),
    scrub,
    rewindButton,
    speed,
    forkButton,
    breakButton,
    compareButton,
    button("cb-save", "save", "Save", "Download this recording (.jsonl.gz)", () => app.send("save"), true),
  );
  const banner = h("div", { class: "cb-banner", hidden: true, role: "status" });
  const bannerText = h("span");
  const bannerBar = h("progress", { max: 1, hidden: true, "aria-label": "Progress" });
  const bannerButton = h("button", { type: "button", class: "cb-btn", hidden: true });
  const bannerClose = h("button", {
    type: "button",
    class: "cb-btn cb-only",
    "aria-label": "Close",
    text: "×",
    onclick: () => {
      banner.hidden = true;
    },
  });
  banner.append(bannerText, bannerBar, bannerButton, bannerClose);
  const notices = new Notices(app);

  const panels = {};
  function panel(name, text, extra = [], cls = "") {
    const body = h("div", { class: "cb-body" });
    const t = h("h2", { text });
    const sub = h("span", { class: "cb-subtitle" });
    const max = h(
      "button",
      {
        type: "button",
        class: "cb-tool cb-max",
        title: "Enlarge",
        "aria-label": `Enlarge ${text}`,
        onclick: () => enlarge(name),
      },
      icon(ICON.max, 11),
    );
    const p = h(
      "section",
      { class: `cb-panel cb-${name} ${cls}`, "aria-label": text },
      h("div", { class: "cb-phead" }, t, sub, h("span", { class: "cb-grow" }), ...extra, max),
      body,
    );
    if (["why", "table", "metrics"].includes(name)) body.tabIndex = 0; // may scroll, and holds nothing else that the keyboard could reach
    panels[name] = { p, body, title: t, sub, max };
    return p;
  }
  const fit = (get) =>
    h(
      "button",
      {
        type: "button",
        class: "cb-tool",
        title: "Show everything (double click)",
        "aria-label": "Show everything",
        onclick: () => views && get().f.fit(),
      },
      icon(ICON.fit, 11),
    );
  const stateKey = h("div", { class: "cb-legend", role: "group", "aria-label": "Legend of states" });
  const blockKey = h("div", { class: "cb-legend", role: "group", "aria-label": "Legend of blocks" });
  const abort = h("button", {
    type: "button",
    class: "cb-btn cb-small cb-abort",
    text: "Abort",
    hidden: true,
    onclick: () => {
      if (app.sel >= 0) app.send("abort", { id: app.R.id(app.sel) });
    },
  });
  const aloneButton = h("button", {
    type: "button",
    class: "cb-btn cb-small cb-alone-open",
    text: "Alone?",
    hidden: true,
    title: "Computes this request once more, without its batch-mates, and shows where its numbers differ",
  });
  const accountTab = h(
    "button",
    {
      type: "button",
      class: "cb-tool cb-accounts",
      hidden: true,
      "aria-label": "Accounts",
      "aria-pressed": "false",
      title: "Accounts: where the step's tokens and the pool's slots are, to the last one (Shift A)",
      onclick: () => utilMode("accounts"),
    },
    icon(ICON.bars, 12),
  );
  const expertTab = h("button", {
    type: "button",
    class: "cb-tool cb-expertstab",
    hidden: true,
    text: "Experts",
    "aria-pressed": "false",
    title: "Experts: tokens of each in this step, layer by layer, in place of utilisation (Shift X)",
    onclick: () => utilMode("experts"),
  });
  const roofTab = h("button", {
    type: "button",
    class: "cb-tool cb-rooftab",
    text: "Roof",
    "aria-pressed": "false",
    title:
      "Roofline: is a step limited by reading memory or by arithmetic, and how near to the limit is it? (Shift U)",
    onclick: () => utilMode("roof"),
  });
  const insideTab = h("button", {
    type: "button",
    class: "cb-tool cb-insidetab",
    text: "Inside",
    "aria-pressed": "false",
    title: "Inside a step: its operators or kernels, and how long each took (Shift I)",
    onclick: () => utilMode("inside"),
  });
  const peaksButton = h("button", {
    type: "button",
    class: "cb-btn cb-small cb-calibrate",
    hidden: true,
    onclick: () => app.send("calibrate"),
  });
  const side = h(
    "aside",
    { class: "cb-left" },
    panel("controls", "Setup"),
    panel("promptbox", "New request"),
  );
  const mid = h(
    "div",
    { class: "cb-mid" },
    panel("timeline", "Timeline", [stateKey, fit(() => views.tv)]),
    h(
      "div",
      { class: "cb-midrow" },
      panel("blocks", "KV blocks", [fit(() => views.bv)]),
      h(
        "div",
        { class: "cb-stack" },
        panel("batch", "Batch"),
        panel("util", "Utilisation", [roofTab, insideTab, expertTab, accountTab]),
      ),
    ),
    panel("tokens", "Text"),
  );
  const right = h(
    "div",
    { class: "cb-right" },
    panel("why", "Why"),
    panel("queue", "Queue"),
    panel("table", "Block table", [aloneButton, abort]),
    panel("metrics", "Metrics"),
  );
  const closeCompare = h("button", {
    type: "button",
    class: "cb-btn cb-small cb-compare-close",
    text: "Close",
    title: "Back to the run (Esc)",
    onclick: () => compareShow(false),
  });
  const comparePanel = panel("compare", "Compare", [closeCompare]);
  comparePanel.hidden = true;
  panels.compare.max.remove();
  const main = h("main", { class: "cb-main" }, side, mid, right, comparePanel);
  const keysBox = h(
    "dialog",
    { class: "cb-dialog cb-keys", "aria-label": "Keyboard shortcuts" },
    h("h2", { text: "Keyboard" }),
    h("dl", {}, ...KEYS.map(([k, t]) => h("div", {}, h("dt", { text: k }), h("dd", { text: t })))),
    h("button", { type: "button", class: "cb-btn", text: "Close", onclick: () => keysBox.close() }),
  );
  const root = h(
    "div",
    { class: "cb-root", dir: "ltr", tabindex: "-1", "data-lm-suppress-shortcuts": "true" },
    header,
    transport,
    banner,
    notices.el,
    main,
    live,
    keysBox,
  );
  const hint = h(
    "div",
    { class: "cb-hint", hidden: true },
    h("b", { text: "Press Step" }),
    " or the right arrow key to run the first iteration. ",
    h("span", {
      text: "Space plays. Point at anything to read it, click a request to follow it everywhere.",
    }),
  );
  panels.timeline.body.append(hint);
  const loading = h("div", { class: "cb-wait" }, h("span", { text: "starting the engine" }));
  panels.timeline.body.append(loading);
  panels.blocks.body.append(h("div", { class: "cb-plot" }));
  const hostBody = h("div", { class: "cb-hostmem", hidden: true });
  panels.blocks.p.append(hostBody, blockKey);
  const utilPlot = h("div", { class: "cb-plot" });
  const accountBody = h("div", { class: "cb-account", hidden: true });
  const expertBody = h("div", { class: "cb-account cb-experts", hidden: true });
  const roofPlot = h("div", { class: "cb-plot cb-roof", hidden: true });
  const insideBody = h("div", { class: "cb-account cb-inside", hidden: true });
  panels.util.body.append(utilPlot, roofPlot, insideBody, accountBody, expertBody);
  const controls = new Controls(panels.controls.body, app);
  const promptBox = new PromptBox(panels.promptbox.body, app);
  const utilText = h("div", { class: "cb-note cb-utiltext" });
  panels.util.p.append(h("div", { class: "cb-utilfoot" }, utilText, peaksButton));
  const bar = new BatchBar(h("canvas", { class: "cb-batchbar", role: "img", "aria-label": "Batch" }), app);
  const words = {
    queue: new QueuePanel(panels.queue.body, app),
    table: new TablePanel(panels.table.body, app, panels.table.title, abort),
    why: new WhyPanel(panels.why.body, app, panels.why.title),
    metrics: new MetricsPanel(panels.metrics.body, app, panels.metrics.sub),
    tokens: new TextPanel(panels.tokens.body, app),
    batch: new BatchPanel(panels.batch.body, app, bar, panels.batch.sub),
    account: new AccountPanel(accountBody, app),
    host: new HostStrip(hostBody, app),
    experts: new ExpertPanel(expertBody, app),
    inside: new InsidePanel(insideBody, app),
  };
  const fork = new ForkForm(app, root, forkButton);
  const menu = new BranchMenu(app, root, branchButton);
  const breaks = new BreakMenu(app, root, breakButton);
  const compare = (words.compare = new ComparePanel(app, panels.compare.body));
  app.promptText = () => promptBox.text.value;
  app.promptAsked = () => promptBox.asked();
  app.focus = () => root.focus({ preventScroll: true });
  const alone = (words.alone = new AloneView(app, root, aloneButton));
  const kernelNotice = new KernelNotice(model, root, (there) => {
    kernelThere = there;
    root.classList.remove("cb-playing");
  });
  header.before(kernelNotice.bar);
  el.classList.add("cb-host");
  el.append(root);
  if (ownPage()) root.classList.add("cb-full");

  let big = null;
  app.isBig = (name) => big === name;
  function enlarge(name) {
    if (big) {
      panels[big].p.classList.remove("cb-big");
      panels[big].max.setAttribute("aria-label", `Enlarge ${panels[big].title.textContent}`);
    }
    big = big === name ? null : name;
    if (big) {
      panels[big].p.classList.add("cb-big");
      panels[big].max.setAttribute("aria-label", "Back to its place");
    }
    root.classList.toggle("cb-hasbig", !!big);
    bar.dirty = true;
    utilTitles();
    paintWords();
    app.dirty();
  }
  function compareShow(open) {
    if (open === compare.open) return;
    comparePanel.hidden = !open;
    root.classList.toggle("cb-comparing", open);
    compareButton.setAttribute("aria-expanded", String(open));
    compare.show(open);
    if (open) closeCompare.focus({ preventScroll: true });
    else compareButton.focus({ preventScroll: true });
  }
  // What the utilisation panel shows: lines over steps, or one of these in their place.
  const MODES = {
    roof: [roofTab, roofPlot, "Roof"],
    inside: [insideTab, insideBody, "Inside a step"],
    experts: [expertTab, expertBody, "Experts"],
    accounts: [accountTab, accountBody, "Accounts"],
  };
  let mode = "";
  function utilMode(name) {
    const was = mode;
    mode = was === name ? "" : name;
    for (const k in MODES) {
      MODES[k][0].setAttribute("aria-pressed", String(k === mode));
      MODES[k][1].hidden = k !== mode;
    }
    utilPlot.hidden = !!mode;
    utilText.parentNode.hidden = !!mode && mode !== "roof";
    utilTitles();
    if (views) {
      views.rv.show(mode === "roof");
      if (!mode) views.sv.advance();
    }
    if (was === "accounts" || mode === "accounts") app.send("account", { on: mode === "accounts" });
    if (words[mode === "accounts" ? "account" : mode]) words[mode === "accounts" ? "account" : mode].draw();
    paintHead();
    app.dirty();
  }
  const roofKey = h(
    "span",
    {},
    h("i", { class: "cb-dotsign cb-sign-decode", "aria-hidden": "true" }),
    "decode",
    h("i", { class: "cb-dotsign cb-sign-prefill", "aria-hidden": "true" }),
    "prefill",
  );
  const counted = h("span", { text: "counted" });
  panels.util.sub.append(roofKey, counted);
  function utilTitles() {
    setText(panels.util.title, mode ? MODES[mode][2] : app.utilTitle || "Utilisation");
    roofKey.hidden = mode !== "roof";
    counted.hidden = mode !== "accounts" || (!!(app.R && app.R.mixture) && big !== "util"); // beside a mixture's tabs there is no room for it
  }
  utilTitles();
  function help() {
    if (keysBox.open) keysBox.close();
    else keysBox.showModal();
  }
  const sizes = new ResizeObserver(() => {
    const w = root.clientWidth;
    root.classList.toggle("cb-narrow", w < 700);
    root.classList.toggle("cb-middle", w >= 700 && w < 1080);
    bar.dirty = true;
    app.dirty();
  });
  sizes.observe(root);

  // what the user does ---------------------------------------------------------------------------------------------------
  app.step = () => app.send("step");
  app.seek = (n) => {
    if (seekTo === null) {
      requestAnimationFrame(() => {
        app.send("seek", { step: seekTo });
        seekTo = null;
      });
    }
    seekTo = n;
  }; // scrubbing: one a frame
  app.ask = (about) => {
    if (JSON.stringify(about) === JSON.stringify(app.asked)) return;
    app.asked = about;
    app.send("ask", about || {});
  };
  app.select = (r) => {
    app.sel = r;
    const R = app.R;
    app.say(
      r < 0
        ? "Selection cleared"
        : `${R.id(r)} selected${R.rows[r] ? `, ${STATE_TEXT[STATES[R.rows[r].code]]}, ${R.rows[r].blocks.length} blocks` : ""}`,
    );
    app.ask(r < 0 ? null : { request: R.id(r) });
    if (views) {
      views.tv.f.dov = true;
      views.bv.f.du = true;
    }
    paintWords();
    panels.tokens.body.scrollTop = 0;
    app.dirty();
  };
  const able = (b, f) => () => {
    if (!b.hidden && !b.disabled) f();
  };
  const SHIFTED = {
    F: able(forkButton, () => fork.pop.toggle()),
    B: able(breakButton, () => breaks.pop.toggle()),
    C: able(compareButton, () => compareShow(!compare.open)),
    X: able(expertTab, () => expertTab.click()),
    U: () => roofTab.click(),
    I: () => insideTab.click(),
    N: able(breakButton, () => breaks.run("run-on")),
    L: able(breakButton, () => breaks.run("run-back")),
    A: able(accountTab, () => accountTab.click()),
    R: able(rewindButton, () => app.send("rewind", { step: app.R.step })),
  };
  root.addEventListener("keydown", (e) => {
    if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey) return;
    const t = e.target;
    const typing = t.matches("textarea, select, input:not([type=range]):not([type=checkbox])");
    if ((keysBox.open && e.key !== "?" && e.key !== "Escape") || (alone.box.open && e.key !== "Escape")) {
      return;
    }
    const k = e.key;
    let done = true;
    if (
      k !== "Escape" &&
      k !== "?" &&
      ((app.popup && app.popup.box.contains(t)) || (t.matches(".cb-cmp-scrub") && k !== " "))
    ) {
      return;
    }
    if (k === "Escape") {
      if (alone.box.open) alone.box.close();
      else if (keysBox.open) keysBox.close();
      else if (app.popup) app.popup.close();
      else if (compare.open) compareShow(false);
      else if (big) enlarge(big);
      else if (typing) root.focus();
      else if (app.sel >= 0) app.select(-1);
      else done = false;
    } else if (typing) {
      return;
    } else if (k === "?") {
      help();
    } else if (k === "p" || k === "P") {
      presenter.set(!presenter.on);
    } else if (k === "/") {
      if (presenter.on) presenter.set(false);
      promptBox.text.focus();
    } else if (k === " ") {
      if (t.tagName === "BUTTON" || t.tagName === "SUMMARY" || t.type === "checkbox") return;
      app.send(app.live.playing ? "pause" : "play");
    } else if (k === "ArrowRight") {
      app.step();
    } else if (k === "ArrowLeft") {
      app.send("back");
    } else if (k === "Home") {
      app.seek(0);
    } else if (k === "End") {
      app.send("end");
    } else if (k === ".") {
      app.send("event", { by: 1 });
    } else if (k === ",") {
      app.send("event", { by: -1 });
    } else if (k in SHIFTED && e.shiftKey) {
      SHIFTED[k]();
    } else {
      done = false;
    }
    if (done) {
      e.preventDefault();
      e.stopPropagation();
    }
  });
  // In Voilà the page is ours: keys work wherever the focus is. In JupyterLab only inside the widget.
  const outer = (e) => {
    if (ownPage() && !root.contains(e.target)) {
      root.dispatchEvent(
        new KeyboardEvent("keydown", {
          key: e.key,
          bubbles: false,
          cancelable: true,
          ctrlKey: e.ctrlKey,
          metaKey: e.metaKey,
          altKey: e.altKey,
          shiftKey: e.shiftKey,
        }),
      ) || e.preventDefault();
    }
  };
  document.addEventListener("keydown", outer);
  root.addEventListener("mousedown", (e) => {
    if (!e.target.closest("button, input, select, textarea, .cb-frame, dialog, label, a")) {
      setTimeout(() => {
        if (!root.contains(document.activeElement)) root.focus({ preventScroll: true });
      }, 0);
    }
  });

  // drawing --------------------------------------------------------------------------------------------------------------
  function legends() {
    const dpr = devicePixelRatio || 1;
    const swatch = (s) => {
      const c = h("canvas", { "aria-hidden": "true" });
      const W = Math.round(22 * dpr);
      const H = Math.round(12 * dpr);
      const tl = new Timeline(1);
      c.width = W;
      c.height = H;
      c.style.cssText = "width:22px;height:12px";
      tl.push(0, 1, s);
      tl.t = 11;
      const im = new ImageData(W, H);
      paintTimeline(
        new Uint32Array(im.data.buffer),
        W,
        H,
        tl,
        { x0: 0.5, x1: 10.5, y0: -0.5, y1: 0.5 },
        app.th.lut,
        dpr,
      );
      c.getContext("2d").putImageData(im, 0, 0);
      return c;
    };
    const seen = app.seen || (app.seen = new Set([1, 2, 3, 4, 6]));
    const order = [1, 2, 3, 13, 14, 10, 4, 5, 7, 8, 9, 11, 12, 6];
    stateKey.replaceChildren(
      ...order
        .filter((s) => seen.has(s))
        .map((s) => h("span", { class: "cb-key" }, swatch(s), STATE_TEXT[STATES[s]])),
    );
    const b = (cls, t) =>
      h("span", { class: "cb-key" }, h("i", { class: "cb-sw " + cls, "aria-hidden": "true" }), t);
    blockKey.replaceChildren(
      b("cb-sw-used", "in use"),
      b("cb-sw-part", "part full"),
      b("cb-sw-shared", "shared"),
      ...(app.reserved ? [b("cb-sw-reserved", "reserved")] : []),
      b("cb-sw-cached", "cached"),
      b("cb-sw-free", "free"),
      ...(app.frag ? [b("cb-sw-frag", "free, in too short a run")] : []),
      ...(app.R && app.R.sinkBlocks ? [b("cb-sw-sink", "attention sink")] : []),
      b("cb-sw-mark", "changed"),
    );
  }
  function paintTheme() {
    const th = app.th;
    const v = {
      bg: th.bg,
      page: th.page,
      fg: th.fg,
      mute: th.mute,
      line: th.line,
      track: th.track,
      accent: th.accent,
      onaccent: th.onAccent,
      bad: th.bad,
      hot: th.hot,
      mark: th.mark,
      tip: th.tip,
      tipfg: th.tipfg,
      free: th.free,
      used: th.own.css[0],
      tint: th.own.tint[0],
      ink: th.own.ink[0],
      prefill: th.state.prefill[0],
      decode: th.state.decode[0],
      warn: th.state.preempted[0],
      l0: th.lines[0],
      l1: th.lines[1],
      good: th.dark ? "#5dbb8a" : "#1a7f4b",
    };
    for (const k in v) root.style.setProperty("--cb-" + k, v[k]);
    root.style.colorScheme = th.dark ? "dark" : "light";
    root.style.fontFamily = th.font;
    root.setAttribute("data-theme", th.dark ? "dark" : "light");
    setText(themeButton, th.dark ? "Light" : "Dark");
    themeButton.title = `Switch to the ${th.dark ? "light" : "dark"} theme`;
    if (ownPage()) {
      document.body.style.background = th.page;
      document.documentElement.style.colorScheme = root.style.colorScheme;
    }
    legends();
  }
  async function retheme() {
    if (dead) return;
    const th = readTheme(el);
    th.scale = presenter.scale;
    if (th.dark === app.th.dark && th.scale === app.th.scale && views) return;
    app.th = th;
    paintTheme();
    if (views) {
      await Promise.all([
        views.tv.f.retheme(th),
        views.bv.f.retheme(th),
        views.sv.f.retheme(th),
        views.rv.f.retheme(th),
      ]);
    }
    bar.dirty = true;
    paintWords();
    app.dirty();
  }
  const presenter = new Presenter(root, () => retheme(), ownPage());
  const unwatch = watchTheme(retheme);
  themeButton.before(presenter.button);
  app.th.scale = presenter.scale;
  paintTheme();
  presenter.begin();
  function ack() {
    if (!ackDue) return;
    ackDue = false;
    post({ type: "ack", seq: lastSeq });
  }
  function paintHead() {
    const R = app.R;
    const L = app.live;
    if (L.title) {
      const t = L.title.map(isolated).join("  ·  ");
      setText(title, t);
      title.title = t;
    }
    if (!R) return;
    const c = R.bl.counts();
    const rate = R.rate();
    if (c.reserved && !app.reserved) {
      app.reserved = true;
      legends();
    }
    if (expertTab.hidden === !!R.mixture) {
      expertTab.hidden = !R.mixture;
      if (!R.mixture && mode === "experts") utilMode("experts");
    }
    setText(st.step, `step ${R.step}`);
    setText(
      st.of,
      (R.event !== null ? ` event ${R.event}` : "") + (R.steps > R.step ? ` of ${R.steps}` : ""),
    );
    const q = R.count();
    setText(st.req, `requests ${q.done}/${Math.max(app.numRequests(), q.requests)} done`);
    st.req.title = q.sequences > q.requests ? `${q.ended} of ${q.sequences} sequences have ended` : "";
    setText(st.rate, isFinite(rate) ? `${sig(rate)} tok/s ${R.meta.clock}` : "");
    st.rate.title = "Output tokens a second over the last 20 steps";
    setText(st.kv, c.total ? `KV ${percent(c.used / c.total)}` : "");
    st.kv.title = `${c.used} of ${c.total} blocks in use; cached blocks count as free`;
    if (document.activeElement !== scrub || seekTo === null) {
      scrub.max = R.steps;
      scrub.value = R.step;
    }
    setAttr(scrub, "aria-valuetext", `step ${R.step} of ${R.steps}`);
    hint.hidden = R.steps > 0 || !!L.loading;
    root.classList.toggle("cb-past", R.step < R.steps);
    rewindButton.hidden = !app.canRewind || R.step >= R.steps;
    const halt =
      app.stop && app.stop.step === R.step ? `stopped: ${app.stop.names.map(isolated).join(", ")}` : "";
    setText(st.stop, halt);
    st.stop.hidden = !halt;
    st.stop.title = halt ? app.stop.text : "";
    const known = R.meta.peak_bytes_s > 0 && R.meta.peak_flops_s > 0;
    const low = R.step > 0 && !!views && views.sv.above(R.step - 1);
    peaksButton.classList.toggle("cb-unknown", !known || low);
    setText(
      peaksButton,
      !known ? "Measure this machine" : low ? "Peak too low: measure" : "Measure the peaks again",
    );
    const i = R.step - 1;
    const foot = !views ? [] : mode !== "roof" ? views.sv.parts(i) : i < 0 ? [] : [["", views.rv.text(i)]];
    const key = foot.join("|");
    if (utilText._key === key) return;
    utilText._key = key;
    utilText.replaceChildren(
      ...foot.flatMap(([sign, t], k) => [
        k ? ", " : "",
        ...(sign ? [h("i", { class: sign, "aria-hidden": "true" })] : []),
        t,
      ]),
    );
    utilText.title = `${R.meta.clock === "modelled" ? "Modelled" : "Achieved"}, ${app.utilOf}: ${utilText.textContent}`;
  }
  function paintWords() {
    clearTimeout(domTimer);
    domTimer = 0;
    domAt = performance.now();
    if (app.R) for (const k in words) words[k].draw();
  }
  function flush() {
    raf = 0;
    if (dead || !app.R || !views) return;
    ack(); // credit goes back when the frame starts: the kernel works while we paint
    const t0 = performance.now();
    const fast = app.live.playing && t0 - app.lastPicture < 150;
    if (app.advanced) app.lastPicture = t0;
    if (app.advanced) {
      // the pictures in every frame; words as often as they can be read, and never for more than a fifth of the time
      app.advanced = false;
      views.tv.advance();
      views.bv.f.du = true;
      views.sv.advance(app.wasReset);
      views.rv.advance();
      app.wasReset = false;
      bar.dirty = true;
      const gap = fast ? Math.max(200, 5 * (app.wordsCost || 0)) : 0;
      const left = gap - (t0 - domAt);
      if (left <= 0) {
        clearTimeout(domTimer);
        domTimer = 0;
        paintHead();
        paintWords();
        app.wordsCost = performance.now() - t0;
      } else if (!domTimer) {
        domTimer = setTimeout(() => {
          paintHead();
          paintWords();
          app.dirty();
        }, left);
      }
    }
    const a = views.tv.f.flush();
    const b = views.bv.f.flush();
    if (!utilPlot.hidden) views.sv.f.flush();
    if (views.rv.shown) views.rv.f.flush();
    bar.paint();
    if (a || b) app.frames++;
    if (!sumTimer) {
      const left = sumAt + 2000 - t0;
      if (left > 0) sumTimer = setTimeout(alternatives, left);
      else alternatives();
    }
  }
  // What the canvases show, in words: every two seconds at most, and at last what they show when they rest.
  function alternatives() {
    sumTimer = 0;
    sumAt = performance.now();
    if (!dead && views && app.R) {
      for (const [canvas, view] of [
        [views.tv.f.under, views.tv],
        [views.bv.f.under, views.bv],
        [bar.c, bar],
      ]) {
        canvas.setAttribute("aria-label", view.summary());
      }
    }
  }
  // messages -------------------------------------------------------------------------------------------------------------
  async function picture(m, bufs) {
    const buf = {};
    m.b.forEach((n, i) => {
      buf[n] = bufs[i];
    });
    lastSeq = m.seq;
    ackDue = true;
    if (m.live) app.live = m.live;
    if (m.reset) {
      const had = app.R && app.sel >= 0 ? app.R.id(app.sel) : null;
      app.R = new Run(m);
      app.why = null;
      app.metrics = null;
      app.account = null;
      app.inside = null;
      app.wasReset = true;
      app.R.apply(m, buf);
      app.sel = had !== null && app.R.index.has(had) ? app.R.index.get(had) : -1;
      const key = [app.R.bl.n, app.R.meta.peak_bytes_s > 0 && app.R.meta.peak_flops_s > 0].join();
      if (!views || views.key !== key) {
        if (views) {
          views.tv.f.destroy();
          views.bv.f.destroy();
          views.sv.destroy();
          views.rv.destroy();
        }
        loading.hidden = true;
        const tv = new TimelineView(Plotly, panels.timeline.body, app);
        const bv = new BlockView(Plotly, panels.blocks.body.firstChild, app);
        const sv = new SeriesView(Plotly, utilPlot, app);
        const rv = new RoofView(Plotly, roofPlot, app);
        await tv.f.init(app.th);
        await bv.f.init(app.th);
        await sv.f.init(app.th);
        await rv.f.init(app.th);
        views = { tv, bv, sv, rv, key };
        rv.show(mode === "roof");
        Object.assign(app, views);
      } else {
        views.tv.win = 60;
        views.tv.follow = true;
        views.tv.n = undefined;
        views.tv.tkey = null;
      }
      const M = app.R.meta;
      app.utilTitle = !views.sv.share
        ? "Utilisation"
        : M.clock === "modelled"
          ? "Of peak, modelled"
          : M.peaks_measured
            ? "Of measured peak"
            : "Of data-sheet peak";
      utilTitles();
      app.utilOf = views.sv.share
        ? `of the ${M.peaks_measured ? "measured" : "data-sheet"} peak of ${M.device || "the device"}`
        : "no peak is known for this device";
      panels.util.title.title = app.utilOf;
      setText(panels.tokens.sub, M.missing.texts || "");
    } else {
      app.R.apply(m, buf);
    }
    const seen = app.seen.size;
    for (const q of app.R.rows) if (q && q.code) app.seen.add(q.code);
    if (!app.frag && app.R.rows.some((q) => q && q.wait === "fragments")) {
      app.frag = true;
      legends();
    }
    if (app.seen.size > seen || app.pinned !== app.R.sinkBlocks) {
      app.pinned = app.R.sinkBlocks;
      legends();
    }
    promptBox.joined(app.R);
    app.advanced = true;
    if (document.hidden) ack();
    else app.dirty();
  }
  function liveUpdate(m) {
    app.live = { ...app.live, ...m.live };
    const L = app.live;
    root.classList.toggle("cb-playing", !!L.playing);
    playButton.setAttribute("aria-pressed", String(!!L.playing));
    root.setAttribute("aria-busy", String(!!L.loading));
    if (L.speed !== undefined && document.activeElement !== speed) speed.value = String(L.speed);
    notices.show(L.notices || []);
    controls.lesson.hidden = L.run === undefined;
    controls.lesson.disabled = !!L.loading;
    if (L.allow_code && !policyBox) {
      side.append(panel("policybox", "Your policy"));
      policyBox = new PolicyBox(panels.policybox.body, app);
    }
    stepButton.disabled = playButton.disabled = !!L.loading || !L.open;
    promptBox.button.disabled = !!L.loading || !L.open || !!L.recording;
    promptBox.button.title = L.recording ? "This is a recording: run it again to add requests" : "";
    promptBox.canSearch(!!L.beams);
    if (L.max_model_len) promptBox.max.max = L.max_model_len;
    const note = L.loading || L.banner;
    banner.hidden = !note;
    banner.className = "cb-banner" + (L.loading ? " cb-loading" : "") + (L.bad ? " cb-badbanner" : "");
    setText(bannerText, note || "");
    bannerBar.hidden = !L.loading;
    if (L.progress >= 0) bannerBar.value = L.progress;
    else bannerBar.removeAttribute("value");
    bannerClose.hidden = !!L.loading;
    bannerButton.hidden = !L.offer;
    if (L.offer) {
      setText(bannerButton, L.offer.text);
      bannerButton.onclick = () => app.send(L.offer.cmd, L.offer.name ? { name: L.offer.name } : {});
    }
    peaksButton.hidden = !L.can_calibrate;
    peaksButton.disabled = !!L.loading;
    peaksButton.title =
      "Measures memory bandwidth and arithmetic, about two seconds: the peaks that utilisation is told against (cbviz calibrate)";
    if (!app.R) {
      loading.hidden = false;
      setText(loading.firstChild, L.loading || "");
    }
    paintHead();
    if (views && app.R) {
      if (views.tv.n !== undefined && views.tv.nrows() !== views.tv.n) {
        app.advanced = true;
        app.dirty();
      }
    }
  }
  function said(m) {
    // an error or a confirmation, put where it belongs
    if (m.cmd === "policy") {
      if (policyBox) policyBox.answer(m);
      else liveUpdate({ live: { banner: m.error, bad: true } });
    } else if (m.cmd === "add") {
      if (m.error) {
        promptBox.fail(m.error);
      } else {
        promptBox.added(m.id);
        app.wantSel = m.id;
      }
    } else if (m.cmd === "fork" || m.cmd === "forkform") {
      fork.said(m);
    } else if (m.cmd === "compare") {
      compare.said(m);
    } else if (m.cmd === "finish" && !m.error) {
      if (compare.open) compare.ask();
    } else if (["break", "watch", "run-on", "run-back"].includes(m.cmd) && breaks.said(m)) {
    } else if (["rename", "drop"].includes(m.cmd) && menu.said(m)) {
    } else if (m.cmd === "alone" && m.error) {
      liveUpdate({ live: { banner: m.error, bad: true } });
    } else if (m.cmd === "abort") {
      app.say(m.error || `${m.id} will be aborted before the next step`);
    } else if (m.field) {
      if (!controls.fail(m.field, m.error || "") && m.error) {
        liveUpdate({ live: { banner: m.error, bad: true } });
      }
    } else if (m.error) {
      liveUpdate({ live: { banner: m.error, bad: true } });
    }
  }
  function family(m) {
    const able = !app.live.recording;
    branchButton.hidden = forkButton.hidden = compareButton.hidden = accountTab.hidden = false;
    forkButton.disabled = !able;
    forkButton.title = able
      ? "Fork: a branch from this step with something changed (Shift F)"
      : "This is a recording: it has no engine to fork";
    app.canRewind = able;
    app.branch = m.name;
    menu.show(m);
    compare.family(m);
    paintHead();
  }
  function stopped(m) {
    app.stop = m.step < 0 ? null : m;
    if (app.stop) app.say(`Stopped at step ${m.text.replace(/^Step /, "")}`);
    if (app.R) {
      paintHead();
      words.why.draw();
    }
  }
  function save(m, bufs) {
    const b = bufs[0];
    const u = URL.createObjectURL(new Blob([b], { type: "application/gzip" }));
    const a = h("a", { href: u, download: m.name });
    root.append(a);
    a.click();
    a.remove();
    setTimeout(() => URL.revokeObjectURL(u), 10000);
    app.say(`Saved ${m.name}`);
  }
  // Voilà starts a new kernel at each load: the address says which run it was, and where the cursor stood.
  let placeTimer = 0;
  function place() {
    if (app.live.run === undefined || placeTimer) return;
    placeTimer = setTimeout(() => {
      placeTimer = 0;
      const u = new URL(location.href);
      const R = app.R;
      if (app.live.run) u.searchParams.set("run", app.live.run);
      else u.searchParams.delete("run");
      if (R && R.step < R.steps) u.searchParams.set("step", R.step);
      else u.searchParams.delete("step");
      if (u.href !== location.href) history.replaceState(history.state, "", u);
    }, 250);
  }
  let chain = Promise.resolve();
  const onmsg = (m, bufs) => {
    if (m.type === "here") return post({ type: "here", n: m.n }); // at once: the kernel asks whether this page is still there
    chain = chain
      .then(() => {
        if (dead) return;
        if (m.type === "picture") {
          if (m.reset || app.R) return picture(m, bufs).then(place);
        } else if (m.type === "live") {
          liveUpdate(m);
          place();
        } else if (m.type === "controls") {
          controls.show(m);
        } else if (m.type === "said") {
          said(m);
        } else if (m.type === "why") {
          app.why = m;
          if (app.R) {
            words.why.draw();
            words.metrics.draw();
          }
        } else if (m.type === "account") {
          app.account = m;
          if (app.R) words.account.draw();
        } else if (m.type === "inside") {
          app.inside = m;
          if (app.R) words.inside.draw();
        } else if (m.type === "family") {
          family(m);
        } else if (m.type === "forkform") {
          fork.show(m);
        } else if (m.type === "breaks") {
          breakButton.hidden = false;
          breaks.show(m);
        } else if (m.type === "stop") {
          stopped(m);
        } else if (m.type === "files") {
          compare.saved(m);
        } else if (m.type === "compared") {
          compare.compared(m);
        } else if (m.type === "comparedrun") {
          compare.comparedRun(m, bufs);
        } else if (m.type === "metrics") {
          app.metrics = m;
          if (app.R) words.metrics.draw();
        } else if (m.type === "clear") {
          controls.clear();
        } else if (m.type === "save") {
          save(m, bufs);
        } else if (m.type === "alone") {
          alone.show(m);
        }
      })
      .catch((e) => {
        console.error(e);
        post({ type: "error", msg: String((e && e.stack) || e) });
      });
  };
  const seen = () => {
    ack();
    if (!document.hidden) app.dirty();
  };
  document.addEventListener("visibilitychange", seen);
  model.on("msg:custom", onmsg);
  model.send({ type: "ready" });
  const stay = ownPage() ? watchLeaving({ send: post }) : () => {};

  // For tests: what has been decoded and drawn, not what the kernel meant. A pending frame is painted first.
  const now = () => {
    if (raf) {
      cancelAnimationFrame(raf);
      flush();
    }
  };
  globalThis.cbviz = {
    state() {
      const R = app.R;
      if (!R) return null;
      now();
      const requests = {};
      const n = R.bl.n;
      R.rows.forEach((q, r) => {
        if (q) {
          requests[R.id(r)] = {
            state: STATES[q.code],
            num_computed_tokens: q.computed,
            output_tokens: q.outputs,
            blocks: Array.from(q.blocks),
            num_preemptions: q.preemptions,
          };
        }
      });
      return {
        step: R.step,
        event: R.event,
        steps: R.steps,
        requests,
        owners: Array.from({ length: n }, (_, i) => (R.bl.refs(i) ? R.id(R.bl.owner(i)) : null)),
        refs: Array.from({ length: n }, (_, i) => R.bl.refs(i)),
        fills: Array.from({ length: n }, (_, i) => R.bl.fill(i)),
        cached: Array.from({ length: n }, (_, i) => !!(R.bl.flags(i) & 1)),
        waiting: R.waiting.map((r) => R.id(r)),
        running: R.running.map((r) => R.id(r)),
        playing: !!app.live.playing,
        selected: app.sel >= 0 ? R.id(app.sel) : null,
        branch: app.branch ?? null,
      };
    },
    frames: () => app.frames,
    text: (id) => {
      const r = app.R.index.get(id);
      return app.R.out[r].text.slice(0, app.R.rows[r] ? app.R.rows[r].outputs : 0).join("");
    },
    idle: () => chain.then(now),
    app,
  };
  return () => {
    dead = true;
    kernelNotice.destroy();
    stay();
    cancelAnimationFrame(raf);
    clearTimeout(domTimer);
    clearTimeout(sumTimer);
    clearTimeout(placeTimer);
    unwatch();
    sizes.disconnect();
    compare.destroy();
    alone.destroy();
    if (app.popup) app.popup.close(false);
    bar.ro.disconnect();
    document.removeEventListener("visibilitychange", seen);
    document.removeEventListener("keydown", outer);
    model.off("msg:custom", onmsg);
    if (views) {
      views.tv.f.destroy();
      views.bv.f.destroy();
      views.sv.destroy();
      views.rv.destroy();
    }
    words.inside.destroy();
    root.remove();
  };
}
