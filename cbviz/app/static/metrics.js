// The figures of the run up to the cursor, and the expressions that are watched.
// @ts-check
import { element, setText } from "./dom.js";
import { showFacts } from "./facts.js";
import { compact, grouped, percent, seconds } from "./format.js";

/** @import { App } from "./page/state.js" */
/** @import { Metrics } from "./messages.js" */

/** @typedef {{ title: string, write: (value: number) => string, help: string }} Metric */

/** @type {Record<string, Metric>} */
export const METRICS = {
  mean_ttft_s: { title: "TTFT", write: seconds, help: "Mean time from arrival to the first token" },
  p99_ttft_s: { title: "TTFT p99", write: seconds, help: "99 of 100 requests had their first token sooner" },
  mean_itl_s: { title: "ITL", write: seconds, help: "Mean time between two tokens of a request" },
  mean_tpot_s: {
    title: "TPOT",
    write: seconds,
    help: "Mean time a token after the first, a request at a time",
  },
  mean_e2e_s: { title: "E2E", write: seconds, help: "Mean time from arrival to the last token" },
  mean_queue_time_s: { title: "queued", write: seconds, help: "Mean time from arrival to the first step" },
  output_throughput: {
    title: "output",
    write: (value) => compact(value) + " tok/s",
    help: "Output tokens a second over the whole recording",
  },
  output_tokens: { title: "tokens", write: compact, help: "Tokens sampled" },
  makespan_s: { title: "makespan", write: seconds, help: "From the first step to the last" },
  batch_utilisation: {
    title: "batch use",
    write: percent,
    help: "Batch utilisation: rows with useful work a seat, mean over steps",
  },
  kv_usage_mean: {
    title: "KV held",
    write: percent,
    help: "KV usage: slots that requests hold, mean over steps",
  },
  prefix_hit_tokens: {
    title: "prefix hits",
    write: compact,
    help: "Tokens found in the cache at first admissions. What a preempted request finds of its own blocks is not counted",
  },
  num_preemptions: {
    title: "preempted",
    write: grouped,
    help: "How often a request lost its blocks",
  },
  recomputed_tokens: {
    title: "recomputed",
    write: compact,
    help: "Tokens computed again after a preemption",
  },
};

export class MetricsPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   * @param {HTMLElement} subtitle of the panel
   */
  constructor(host, app, subtitle) {
    this.app = app;
    this.subtitle = subtitle;
    this.figures = element("dl", { class: "cb-facts cb-metricslist" });
    this.none = element("p", { class: "cb-empty", text: "Figures appear with the first tokens." });
    this.watched = element("dl", { class: "cb-facts cb-watched" });
    host.append(this.watched, this.none, this.figures);
    /** @type {Metrics | null} */
    this.shown = null;
  }

  draw() {
    this.drawWatched();
    const { metrics } = this.app;
    this.none.hidden = !!metrics;
    this.figures.hidden = !metrics;
    setText(this.subtitle, metrics ? `steps 1–${grouped(metrics.steps)}, means, ${metrics.clock}` : "");
    if (!metrics || metrics === this.shown) return;
    this.shown = metrics;
    const facts = Object.entries(METRICS)
      .filter(([key]) => Number.isFinite(metrics.values[key]))
      .map(([key, { title, write, help }]) => ({
        name: title,
        value: write(metrics.values[key]),
        help,
        data: /** @type {[string, string]} */ (["data-metric", key]),
      }));
    showFacts(this.figures, facts);
  }

  drawWatched() {
    const watched = this.app.why?.watched ?? [];
    this.watched.hidden = !watched.length;
    const facts = watched.map(([name, value]) => ({
      name,
      value,
      help: "Watched expression, at the cursor",
      data: /** @type {[string, string]} */ (["data-watch", name]),
    }));
    showFacts(this.watched, facts);
  }
}
