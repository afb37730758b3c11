// Who runs, who waits, and what the head of the queue waits for.
// @ts-check
import { ChipList } from "./chips.js";
import { element, setText } from "./dom.js";
import { grouped, plural } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Run } from "./store.js" */

const MOST_RUNNING = 48;
const MOST_WAITING = 24;

/**
 * By the reason of the wait: what is needed and what is there.
 * @type {Record<string, (need: number, have: number) => string>}
 */
const WAIT_TEXT = {
  seats: (need, have) =>
    need > 1
      ? `its ${plural(need, "sequence")} need a seat each, ${grouped(have)} free`
      : "all seats are taken",
  blocks: (need, have) => `needs ${plural(need, "block")}, ${grouped(have)} free`,
  budget: (need, have) => `needs ${plural(need, "token")} of the step's budget, ${grouped(have)} left`,
  batch: (_, have) => `the batch has not ended: ${plural(have, "request")} still running`,
  preempted: () => "nobody is admitted in a step that preempted",
  "decode-step": () => "this step only decodes",
  watermark: (need, have) => `needs ${grouped(need)} blocks above the watermark, ${grouped(have)} free`,
  reserve: (need, have) => `its reservation of ${plural(need, "block")} does not fit, ${grouped(have)} free`,
  fragments: (need, have) =>
    `needs ${plural(need, "block")} side by side, the longest free run has ${grouped(have)}`,
  guarantee: (need, have) =>
    `all prompts and longest outputs would need ${plural(need, "more block")}, ${grouped(have)} free`,
  estimate: (need, have) =>
    `what is expected of all would need ${plural(need, "more block")}, ${grouped(have)} free`,
  degraded: (_, have) => `overload: the batch class goes one at a time, ${grouped(have)} running`,
  policy: () => "the policy said no",
};

/**
 * What a request waits for; empty: it doesn't.
 * @param {Pick<Run, "rows">} run
 * @param {number} row
 */
export function waitText(run, row) {
  const request = run.rows[row];
  if (!request?.wait) return "";
  return WAIT_TEXT[request.wait]?.(request.need, request.have) ?? request.wait;
}

export class QueuePanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.running = new ChipList(app, MOST_RUNNING);
    this.waiting = new ChipList(app, MOST_WAITING);
    this.runningTitle = element("div", { class: "cb-sub" });
    this.waitingTitle = element("div", { class: "cb-sub" });
    this.reason = element("div", { class: "cb-note" });
    host.append(this.runningTitle, this.running.node, this.waitingTitle, this.waiting.node, this.reason);
  }

  draw() {
    const { run } = this.app;
    const seats = run.config.max_num_seqs;
    setText(this.runningTitle, `running ${run.running.length}${seats ? ` of ${seats} seats` : ""}`);
    this.running.show(run.running);
    setText(this.waitingTitle, `waiting ${run.waiting.length}`);
    this.waiting.show(run.waiting);
    const head = run.waiting[0];
    const reason = run.waiting.length ? waitText(run, head) : "";
    setText(this.reason, reason ? `${run.name(head)}: ${reason}` : "");
  }
}
