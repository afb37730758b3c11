// The buttons that move the cursor and the engine: step, play, scrub, rewind, fork, break, compare, save.
// @ts-check
import { element, icon, ICON, setAttr } from "../dom.js";

/** @import { Live } from "../messages.js" */
/** @import { App } from "./state.js" */

/** Steps a second; 0: as fast as it goes. */
const SPEEDS = [
  ["1", "1 step/s"],
  ["2", "2 steps/s"],
  ["5", "5 steps/s"],
  ["10", "10 steps/s"],
  ["30", "30 steps/s"],
  ["0", "full speed"],
];
const USUAL_SPEED = "10";
const FORK_TITLE = "Fork: a branch from this step with something changed (Shift F)";

/**
 * A button with a picture; `shown`: its text stands beside it, else it is only read out.
 * @param {{ name: string, picture: keyof typeof ICON, text: string, title: string, shown?: boolean, onclick?: () => void }} what
 */
function iconButton({ name, picture, text, title, shown = false, onclick = () => {} }) {
  return element(
    "button",
    {
      type: "button",
      class: `cb-btn ${name}${shown ? "" : " cb-only"}`,
      title,
      "aria-label": text,
      onclick,
    },
    icon(ICON[picture]),
    shown ? element("span", { text }) : null,
  );
}

/**
 * A button that is hidden until the kernel says that it can.
 * @param {Parameters<typeof iconButton>[0]} what
 */
function laterButton(what) {
  const button = iconButton({ shown: true, ...what });
  button.hidden = true;
  return button;
}

export class Transport {
  /**
   * @param {App} app
   * @param {() => void} toggleCompare
   */
  constructor(app, toggleCompare) {
    this.app = app;
    const send = (/** @type {string} */ cmd) => () => app.send(cmd);
    this.playButton = iconButton({
      name: "cb-play",
      picture: "play",
      text: "Play",
      title: "Play (Space)",
      shown: true,
      onclick: send("play"),
    });
    this.stepButton = iconButton({
      name: "cb-step cb-primary",
      picture: "step",
      text: "Step",
      title: "One step (→)",
      shown: true,
      onclick: () => app.step(),
    });
    this.forkButton = laterButton({ name: "cb-fork", picture: "branch", text: "Fork", title: FORK_TITLE });
    this.breakButton = laterButton({
      name: "cb-break",
      picture: "stop",
      text: "Break",
      title: "Breakpoints and watches (Shift B)",
    });
    this.breakCount = element("em", { class: "cb-count", hidden: true });
    this.breakButton.append(this.breakCount);
    this.compareButton = laterButton({
      name: "cb-compare-open",
      picture: "sides",
      text: "Compare",
      title: "Compare branches and saved runs (Shift C)",
      onclick: toggleCompare,
    });
    this.compareButton.setAttribute("aria-expanded", "false");
    this.rewindButton = laterButton({
      name: "cb-rewind",
      picture: "rewind",
      text: "Rewind here",
      title: "Take the engine back to this step; what comes later is kept as a branch (Shift R)",
      onclick: () => app.rewind(),
    });
    this.scrub = element("input", {
      type: "range",
      class: "cb-scrub",
      min: 0,
      max: 0,
      value: 0,
      "aria-label": "Step",
      oninput: () => app.seek(Number(this.scrub.value)),
    });
    this.speed = element(
      "select",
      {
        class: "cb-speed",
        "aria-label": "Speed of play",
        onchange: () => app.send("speed", { value: Number(this.speed.value) }),
      },
      ...SPEEDS.map(([value, text]) => element("option", { value, text, selected: value === USUAL_SPEED })),
    );
    const substeps = element(
      "span",
      { class: "cb-substeps" },
      iconButton({
        name: "cb-event-back",
        picture: "before",
        text: "One event back",
        title: "One event back, inside the step (,)",
        onclick: () => app.send("event", { by: -1 }),
      }),
      iconButton({
        name: "cb-event-on",
        picture: "on",
        text: "One event on",
        title: "One event on, inside the step (.)",
        onclick: () => app.send("event", { by: 1 }),
      }),
    );
    this.node = element(
      "div",
      { class: "cb-transport", role: "toolbar", "aria-label": "Transport" },
      iconButton({
        name: "cb-reset",
        picture: "reset",
        text: "Restart from step 0",
        title: "Restart: step 0, same workload, same settings",
        onclick: send("reset"),
      }),
      iconButton({
        name: "cb-back",
        picture: "back",
        text: "One recorded step back",
        title: "One step back (←)",
        onclick: send("back"),
      }),
      this.stepButton,
      this.playButton,
      iconButton({
        name: "cb-pause",
        picture: "pause",
        text: "Pause",
        title: "Pause (Space)",
        shown: true,
        onclick: send("pause"),
      }),
      iconButton({
        name: "cb-end",
        picture: "end",
        text: "Last recorded step",
        title: "Last recorded step (End)",
        onclick: send("end"),
      }),
      substeps,
      this.scrub,
      this.rewindButton,
      this.speed,
      this.forkButton,
      this.breakButton,
      this.compareButton,
      iconButton({
        name: "cb-save",
        picture: "save",
        text: "Save",
        title: "Download this recording (.jsonl.gz)",
        shown: true,
        onclick: send("save"),
      }),
    );
  }

  /** @param {Live} live */
  showLive({ playing, speed, loading, open }) {
    this.playButton.setAttribute("aria-pressed", String(!!playing));
    this.playButton.disabled = !!loading || !open;
    this.stepButton.disabled = this.playButton.disabled;
    const choosing = document.activeElement === this.speed;
    if (speed !== undefined && !choosing) this.speed.value = String(speed);
  }

  /** The kernel keeps branches: forks and comparisons are possible, on a recording only the latter. */
  showFamily() {
    const able = !this.app.live.recording;
    this.forkButton.hidden = false;
    this.compareButton.hidden = false;
    this.forkButton.disabled = !able;
    this.forkButton.title = able ? FORK_TITLE : "This is a recording: it has no engine to fork";
  }

  draw() {
    const { run, seekingTo, canRewind } = this.app;
    const scrubbing = document.activeElement === this.scrub && seekingTo !== null;
    if (!scrubbing) {
      this.scrub.max = String(run.steps);
      this.scrub.value = String(run.step);
    }
    setAttr(this.scrub, "aria-valuetext", `step ${run.step} of ${run.steps}`);
    this.rewindButton.hidden = !canRewind || run.step >= run.steps;
  }
}
