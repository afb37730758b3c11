// The panels made of words: text, why, queue, block table, metrics, batch list. Each reads the Run and rewrites only what changed.
import { STATES, STATE_TEXT } from "./color.js";
import { CACHED } from "./store.js";
import { KINDS } from "./batch.js";
import { nf, seconds, compact, percent, plural, cut } from "./format.js";
import { h, sync, setText, setAttr } from "./dom.js";
import { isolated } from "./texts.js";

export function chip(app, r, extra = "") {
  const b = h(
    "button",
    {
      type: "button",
      class: "cb-chip " + extra,
      "data-request": app.R.id(r),
      onclick: () => app.select(app.sel === r ? -1 : r),
    },
    h("i", { "aria-hidden": "true" }),
    h("span", { dir: "auto", text: app.R.id(r) }),
  );
  return paintChip(app, b, r);
}
function paintChip(app, b, r) {
  const q = app.R.rows[r];
  const key = `${app.th.dark}${app.sel === r}${q ? q.code : ""}${r}`;
  if (b._key === key) return b;
  b._key = key;
  b.style.setProperty("--own", app.th.own.css[r & 255]);
  b.setAttribute("aria-pressed", String(app.sel === r));
  b.title = q ? `${app.R.name(r)}: ${STATE_TEXT[STATES[q.code]]}` : app.R.id(r);
  return b;
}
const chips = (app, host, list, most = 48) => {
  const over = list.length - most;
  sync(
    host,
    list.slice(0, most),
    (r) => app.R.id(r),
    (r) => chip(app, r),
    (n, r) => paintChip(app, n, r),
  );
  setText(
    host._more || (host._more = host.parentNode.appendChild(h("span", { class: "cb-more" }))),
    over > 0 ? `and ${nf.format(over)} more` : "",
  );
};

export function waitText(app, r) {
  const q = app.R.rows[r];
  if (!q || !q.wait) return "";
  const n = nf.format(q.need);
  const v = nf.format(q.have);
  return (
    {
      seats:
        q.need > 1 ? `its ${plural(q.need, "sequence")} need a seat each, ${v} free` : "all seats are taken",
      blocks: `needs ${plural(q.need, "block")}, ${v} free`,
      budget: `needs ${plural(q.need, "token")} of the step's budget, ${v} left`,
      batch: `the batch has not ended: ${plural(q.have, "request")} still running`,
      preempted: "nobody is admitted in a step that preempted",
      "decode-step": "this step only decodes",
      watermark: `needs ${n} blocks above the watermark, ${v} free`,
      reserve: `its reservation of ${plural(q.need, "block")} does not fit, ${v} free`,
      fragments: `needs ${plural(q.need, "block")} side by side, the longest free run has ${v}`,
      guarantee: `all prompts and longest outputs would need ${plural(q.need, "more block")}, ${v} free`,
      estimate: `what is expected of all would need ${plural(q.need, "more block")}, ${v} free`,
      degraded: `overload: the batch class goes one at a time, ${v} running`,
      policy: "the policy said no",
    }[q.wait] ?? q.wait
  );
}
export class QueuePanel {
  constructor(host, app) {
    this.app = app;
    this.run = h("div", { class: "cb-chips" });
    this.wait = h("div", { class: "cb-chips" });
    this.rh = h("div", { class: "cb-sub" });
    this.wh = h("div", { class: "cb-sub" });
    this.why = h("div", { class: "cb-note" });
    host.append(this.rh, h("div", {}, this.run), this.wh, h("div", {}, this.wait), this.why);
  }
  draw() {
    const { R } = this.app;
    const seats = R.config.max_num_seqs;
    setText(this.rh, `running ${R.running.length}${seats ? ` of ${seats} seats` : ""}`);
    chips(this.app, this.run, R.running);
    setText(this.wh, `waiting ${R.waiting.length}`);
    chips(this.app, this.wait, R.waiting, 24);
    const head = R.waiting[0];
    const t = head === undefined ? "" : waitText(this.app, head);
    setText(this.why, t ? `${R.name(head)}: ${t}` : "");
  }
}

export class TablePanel {
  constructor(host, app, title, abort) {
    this.app = app;
    this.title = title;
    this.abort = abort;
    this.facts = h("dl", { class: "cb-facts" });
    this.cells = h("div", { class: "cb-cells" });
    this.none = h("p", {
      class: "cb-empty",
      text: "Pick a request: click its row in the timeline, one of its blocks, or its name anywhere.",
    });
    this.prompt = h("p", { class: "cb-note cb-prompttext", dir: "auto" });
    host.append(this.none, this.facts, this.cells, this.prompt);
  }
  draw() {
    const { R, sel } = this.app;
    const q = sel >= 0 ? R.rows[sel] : null;
    const who = sel >= 0 ? R.id(sel) : "";
    setText(this.title, who ? `Block table of ${isolated(who)}` : "Block table");
    this.none.hidden = !!q || sel >= 0;
    this.facts.hidden = this.cells.hidden = !q;
    const i = sel >= 0 ? R.info[sel] : null;
    setText(this.prompt, i && i.prompt ? "“" + cut(i.prompt, 400) + "”" : "");
    this.prompt.hidden = !(i && i.prompt);
    this.abort.hidden = sel < 0;
    this.abort.disabled = !q || q.status === "finished" || q.status === "refused" || R.step !== R.steps;
    this.abort.title =
      this.abort.disabled && q && R.step !== R.steps
        ? "Go to the last step first: an abort takes effect before the next one"
        : "Takes effect just before the next step";
    if (!q) {
      if (sel >= 0) {
        this.facts.hidden = false;
        sync(this.facts, [["state", "not arrived"]], (f) => f[0], fact, fill);
      }
      return;
    }
    const facts = [
      ["state", q.end ? `${STATE_TEXT[STATES[q.code]]}: ${q.end}` : STATE_TEXT[STATES[q.code]]],
      ["prompt", nf.format(i.np)],
      ["output", `${nf.format(q.outputs)} / ${nf.format(i.mt)}`],
      ["computed", `${nf.format(q.computed)} / ${nf.format(i.np + q.outputs)}`],
    ];
    if (q.cached) facts.push(["from cache", nf.format(q.cached)]);
    if (q.preemptions) facts.push(["preempted", nf.format(q.preemptions) + "×"]);
    if (i.pr) facts.push(["priority", String(i.pr)]);
    const held = q.blocks.reduce((n, b) => n + (b > 0), 0);
    const room = held * R.bl.size * (R.meta.kv_bytes || 0);
    if (room) {
      facts.push([
        "KV held",
        room >= 1e6 ? `${(room / 1e6).toFixed(1)} MB` : `${Math.max(1, Math.round(room / 1e3))} KB`,
      ]);
    }
    sync(this.facts, facts, (f) => f[0], fact, fill);
    const sinks = R.sinkBlocks;
    const bl = R.bl;
    const list = Array.from(q.blocks.slice(0, 400), (b, k) => [k, b]);
    sync(
      this.cells,
      list,
      (c) => c[0] + ">" + c[1],
      ([k, b]) =>
        h(
          "span",
          { class: "cb-cell" },
          h("i", { text: k + ">" }),
          h("b", { text: b ? String(b) : "null" }),
          h("em"),
        ),
      (n, [k, b]) => {
        const refs = bl.refs(b);
        const full = bl.fill(b) >= bl.size;
        n.classList.toggle("cb-shared", refs > 1);
        n.classList.toggle("cb-changed", !!bl.marked[b]);
        const part = Math.round(100 * Math.min(1, Math.max(0, (q.computed - k * bl.size) / bl.size))) + "%";
        if (n._part !== part) {
          n._part = part;
          n.style.setProperty("--fill", part);
        }
        setText(n.lastChild, k < sinks ? "sink" : refs > 1 ? `×${refs}` : "");
        n.classList.toggle("cb-gone", !b);
        if (!b) {
          return setAttr(
            n,
            "title",
            `tokens ${k * bl.size}–${(k + 1) * bl.size - 1} lie left of the window: their block was given back`,
          );
        }
        setAttr(
          n,
          "title",
          `tokens ${k * bl.size}–${(k + 1) * bl.size - 1} stand in block ${b}` +
            (refs > 1 ? `, shared by ${refs} requests` : "") +
            (full ? "" : ", not full") +
            (k < sinks ? `, attention sinks: every query sees the first ${R.meta.sinks} tokens` : "") +
            (bl.flags(b) & CACHED ? ", can be found by its hash" : ""),
        );
      },
    );
  }
}
const fact = ([k]) => h("div", {}, h("dt", { text: k }), h("dd"));
const fill = (n, [, v]) => setText(n.lastChild, v);

const KIND_CLASS = {
  preempted: "bad",
  unscheduled: "bad",
  refused: "bad",
  not_admitted: "wait",
  notadmitted: "wait",
  waits: "wait",
  evicted: "warn",
  prefix_miss: "warn",
  prefixmiss: "warn",
  prefix_hit: "good",
  prefixhit: "good",
  finished: "good",
  admitted: "good",
};
export const toneOf = (kind) => KIND_CLASS[kind] ?? "plain";
// A sentence with its request ids as buttons.
export function sentence(app, text, ids) {
  const out = [];
  const known = ids.filter((i) => app.R.index.has(i)).sort((a, b) => b.length - a.length);
  let rest = text;
  while (rest && known.length) {
    let at = -1;
    let who = "";
    for (const id of known) {
      for (let p = rest.indexOf(id); p >= 0; p = rest.indexOf(id, p + 1)) {
        if (/[\w-]/.test(rest[p - 1] || " ") || /[\w-]/.test(rest[p + id.length] || " ")) continue;
        if (at < 0 || p < at) {
          at = p;
          who = id;
        }
        break;
      }
    }
    if (at < 0) break;
    out.push(rest.slice(0, at));
    const r = app.R.index.get(who);
    out.push(
      h("button", { type: "button", class: "cb-id", dir: "auto", text: who, onclick: () => app.select(r) }),
    );
    rest = rest.slice(at + who.length);
  }
  out.push(rest);
  return out;
}
export class WhyPanel {
  constructor(host, app, title) {
    this.app = app;
    this.title = title;
    this.list = h("ol", { class: "cb-sentences" });
    this.none = h("p", { class: "cb-empty" });
    this.stop = h("div", { class: "cb-stop", hidden: true });
    this.moment = h("p", { class: "cb-moment", hidden: true });
    this.aboutTitle = h("span");
    this.aboutList = h("ol", { class: "cb-sentences" });
    this.about = h(
      "details",
      { class: "cb-about", open: true, hidden: true },
      h("summary", {}, this.aboutTitle),
      this.aboutList,
    );
    host.append(this.stop, this.moment, this.about, this.none, this.list);
  }
  lines(host, items) {
    host.replaceChildren(
      ...items.map((s) =>
        h(
          "li",
          { class: "cb-s-" + toneOf(s.kind), "data-kind": s.kind },
          ...sentence(this.app, s.text, s.ids),
        ),
      ),
    );
  }
  draw() {
    const w = this.app.why;
    const R = this.app.R;
    const late = !w || w.step !== R.step;
    setText(this.title, !R.step ? "Why" : `Why, step ${nf.format(late && this.key ? this.w.step : R.step)}`);
    this.extras(late ? null : w);
    setText(
      this.none,
      !R.step
        ? "Each step is explained here: who was admitted, who waits and for what, who was preempted and why."
        : late || w.items.length
          ? ""
          : "Nothing was decided in this step but to go on.",
    );
    this.none.hidden = !this.none.textContent;
    if (!R.step) {
      this.list.replaceChildren();
      this.key = "";
      this.w = null;
      return;
    }
    if (late) return;
    const key = `${w.step}:${w.items.length}:${R.event}`;
    if (this.key === key && this.w === w) return;
    this.key = key;
    this.w = w;
    this.lines(this.list, w.items);
  }
  // Above the step's sentences: why the run stopped here, the event that the cursor has just walked over, and what was asked about.
  extras(w) {
    const { R, stop } = this.app;
    const here = stop && stop.step === R.step ? stop : null;
    this.stop.hidden = !here;
    if (here !== this.here || (here && w !== this.hw)) {
      this.here = here;
      this.hw = w;
      if (here) {
        this.stop.replaceChildren(
          h("b", { text: "Stopped: " }),
          ...here.names.flatMap((n, i) => [
            ...(i ? ["; "] : []),
            h("span", { class: "cb-stopname", dir: "auto", text: n }),
            ...(here.sentences[i].text.startsWith(n) ||
            (w && w.items.some((x) => x.text === here.sentences[i].text))
              ? []
              : [": ", ...sentence(this.app, here.sentences[i].text, here.sentences[i].request_ids)]),
          ]),
        );
      }
    }
    const m = w && R.event !== null && w.event === R.event ? w.moment : null;
    this.moment.hidden = R.event === null;
    if (m && m !== this.m) {
      this.m = m;
      this.moment.replaceChildren(
        h("b", { text: `Event ${R.event} of ${w.num_events}: ` }),
        ...sentence(this.app, m.text, m.ids),
      );
    } else if (R.event !== null && !m && !this.m) {
      setText(this.moment, `Event ${R.event}`);
    }
    if (R.event === null) this.m = null;
    const a = w && w.about;
    if (!this.app.asked || !R.step) {
      this.about.hidden = true;
      this.a = null;
    } else if (
      a &&
      a !== this.a &&
      (a.request === this.app.asked.request || a.block === this.app.asked.block)
    ) {
      this.a = a;
      this.about.hidden = false;
      setText(this.aboutTitle, a.title);
      this.lines(this.aboutList, a.items);
    }
  }
}

// title, how to write it, what it means
export const METRICS = {
  mean_ttft_s: ["TTFT", seconds, "Mean time from arrival to the first token"],
  p99_ttft_s: ["TTFT p99", seconds, "99 of 100 requests had their first token sooner"],
  mean_itl_s: ["ITL", seconds, "Mean time between two tokens of a request"],
  mean_tpot_s: ["TPOT", seconds, "Mean time a token after the first, a request at a time"],
  mean_e2e_s: ["E2E", seconds, "Mean time from arrival to the last token"],
  mean_queue_time_s: ["queued", seconds, "Mean time from arrival to the first step"],
  output_throughput: [
    "output",
    (v) => compact(v) + " tok/s",
    "Output tokens a second over the whole recording",
  ],
  output_tokens: ["tokens", (v) => compact(v), "Tokens sampled"],
  makespan_s: ["makespan", seconds, "From the first step to the last"],
  batch_utilisation: [
    "batch use",
    percent,
    "Batch utilisation: rows with useful work a seat, mean over steps",
  ],
  kv_usage_mean: ["KV held", percent, "KV usage: slots that requests hold, mean over steps"],
  prefix_hit_tokens: [
    "prefix hits",
    (v) => compact(v),
    "Tokens found in the cache at first admissions. What a preempted request finds of its own blocks is not counted",
  ],
  num_preemptions: ["preempted", (v) => nf.format(v), "How often a request lost its blocks"],
  recomputed_tokens: ["recomputed", (v) => compact(v), "Tokens computed again after a preemption"],
};
export class MetricsPanel {
  constructor(host, app, title) {
    this.app = app;
    this.title = title;
    this.dl = h("dl", { class: "cb-facts cb-metricslist" });
    this.none = h("p", { class: "cb-empty", text: "Figures appear with the first tokens." });
    this.watched = h("dl", { class: "cb-facts cb-watched" });
    host.append(this.watched, this.none, this.dl);
  }
  draw() {
    const w = this.app.why;
    const list = w && w.watched ? w.watched : [];
    this.watched.hidden = !list.length;
    sync(
      this.watched,
      list,
      (x) => x[0],
      (x) => {
        const n = fact(x);
        n.title = "Watched expression, at the cursor";
        n.setAttribute("data-watch", x[0]);
        return n;
      },
      fill,
    );
    const m = this.app.metrics;
    this.none.hidden = !!m;
    this.dl.hidden = !m;
    setText(this.title, m ? `steps 1–${nf.format(m.steps)}, means, ${m.clock}` : "");
    if (!m || m === this.last) return;
    this.last = m;
    const rows = Object.entries(METRICS)
      .filter(([k]) => typeof m.values[k] === "number" && isFinite(m.values[k]))
      .map(([k, [t, f, help]]) => [t, f(m.values[k]), help, k]);
    sync(
      this.dl,
      rows,
      (x) => x[0],
      (x) => {
        const n = fact(x);
        n.title = x[2];
        n.setAttribute("data-metric", x[3]);
        return n;
      },
      fill,
    );
  }
}

export class TextPanel {
  constructor(host, app, most = 24) {
    Object.assign(this, { app, most });
    this.host = h("div", { class: "cb-texts" });
    this.none = h("p", { class: "cb-empty", text: "The words of each request appear here as it is served." });
    this.more = h("p", { class: "cb-note" });
    host.append(this.none, this.host, this.more);
  }
  draw() {
    const { R, sel } = this.app;
    const by = { running: [], preempted: [], waiting: [], finished: [], refused: [] };
    R.rows.forEach((q, r) => {
      if (q) (q.outputs || q.status === "running" || r === sel ? by[q.status] : by.refused).push(r);
    });
    let list = [
      ...by.running,
      ...by.preempted,
      ...by.waiting,
      ...by.finished.sort((a, b) => R.root[b] - R.root[a] || a - b),
    ];
    const all = list.length;
    if (sel >= 0 && list.includes(sel)) list = [sel, ...list.filter((r) => r !== sel)];
    list = list.slice(0, this.most);
    this.none.hidden = all > 0;
    setText(
      this.more,
      all > list.length
        ? `and ${plural(all - list.length, "request")} more: pick one in the timeline to read it`
        : "",
    );
    sync(
      this.host,
      list,
      (r) => R.id(r),
      (r) => this.make(r),
      (n, r) => this.row(n, r),
    );
  }
  make(r) {
    const said = h("div", { class: "cb-words", dir: "auto" });
    const search = h("span", { class: "cb-note" });
    const p = this.app.R.info[r].prompt;
    const n = h(
      "div",
      { class: "cb-textrow" },
      chip(this.app, r),
      h(
        "div",
        { class: "cb-said" },
        h(
          "div",
          {},
          p ? h("span", { class: "cb-asked", dir: "auto", text: cut(p.replace(/\s+/g, " "), 160) }) : null,
          said,
          search,
        ),
      ),
    );
    n._said = said;
    n._search = search;
    n._from = 0;
    n._n = 0;
    n._new = [];
    return n;
  }
  row(n, r) {
    const { R, sel } = this.app;
    const q = R.rows[r];
    const open = R.searching(r);
    const o = open ? R.beam(r) : R.out[r];
    const want = open ? o.text.length : q.outputs;
    const said = n._said;
    paintChip(this.app, n.firstChild, r);
    n.classList.toggle("cb-picked", r === sel);
    n.classList.toggle("cb-lesser", open && o.place > 0);
    setAttr(n, "data-state", STATES[q.code]);
    const rank = open
      ? o
      : o.told && q.outputs && o.search
        ? { place: o.search[0].ids.indexOf(r), of: o.search[0].ids.length }
        : null; // a search's outcome stands in its beams' rows, best first
    setText(
      n._search,
      !rank
        ? ""
        : ` – ${rank.place ? `beam ${rank.place + 1}` : "the best"} of ${rank.of}${!open ? "" : q.status === "finished" ? " so far, stopped before the search ended" : " so far, not final"}`,
    );
    setAttr(n._search, "title", open ? `log-probability ${o.score.toFixed(2)}` : "");
    const whole = r === sel || this.app.isBig("tokens");
    const window = whole ? 2000 : 80;
    const from = Math.max(0, Math.floor((want - window) / 40) * 40); // two lines are shown of the others
    if (n._run !== R || from !== n._from || want < n._from || open || n._open !== open) {
      said.replaceChildren();
      n._from = n._n = from;
      n._run = R;
      n._open = open;
      n._new = [];
      if (from) said.append(h("span", { class: "cb-note", text: "… " }));
    }
    while (n._n > want) {
      said.lastChild.remove();
      n._n--;
    }
    for (; n._n < want; n._n++) {
      const draft = n._n + 1 < want && o.step[n._n + 1] === o.step[n._n];
      said.append(
        h("span", {
          class: draft ? "cb-drafted" : null,
          text: o.text[n._n],
          title: `token ${n._n + 1}, step ${o.step[n._n]}${draft ? ", an accepted draft" : ""}`,
        }),
      );
    }
    for (const s of n._new) s.classList.remove("cb-new");
    n._new = [];
    for (
      let i = want - 1, s = said.lastChild;
      i >= n._from && o.step[i] === R.step && s;
      i--, s = s.previousSibling
    ) {
      s.classList.add("cb-new");
      n._new.push(s);
    }
  }
}

export class BatchPanel {
  constructor(host, app, bar, title) {
    Object.assign(this, { app, bar, title });
    this.sums = h("div", { class: "cb-sums" });
    this.rows = h("div", { class: "cb-batchrows" });
    host.append(bar.c, this.sums, this.rows);
  }
  draw() {
    const { R } = this.app;
    const s = this.bar.sums();
    const total = s.reduce((a, b) => a + b, 0);
    this.bar.dirty = true;
    setText(
      this.title,
      R.step
        ? `${plural(total, "token")}${R.config.budget ? ` of ${nf.format(R.config.budget)}` : ""}, ${plural(R.chunks.length, "request")}`
        : "what a step computes for whom",
    );
    sync(
      this.sums,
      KINDS.map((k, i) => [k, s[i]]).filter(
        (x) => R.step && (x[1] || x[0] === "prefill" || x[0] === "decode"),
      ),
      (x) => x[0],
      ([k]) =>
        h(
          "span",
          { class: "cb-sum" },
          h("i", { "data-kind": k, "aria-hidden": "true" }),
          h("b"),
          h("span", { text: " " + k }),
        ),
      (n, x) => {
        const c = this.app.th.state[x[0]][0];
        if (n._c !== c) {
          n._c = c;
          n.firstChild.style.background = c;
        }
        setText(n.childNodes[1], nf.format(x[1]));
      },
    );
    sync(
      this.rows,
      R.chunks.slice(0, 24),
      (k) => R.id(k.r),
      (k) =>
        h("div", { class: "cb-batchrow" }, chip(this.app, k.r), h("i", { "aria-hidden": "true" }), h("span")),
      (n, k) => {
        paintChip(this.app, n.firstChild, k.r);
        const c = this.app.th.state[KINDS[k.kind]][0];
        if (n._c !== c) {
          n._c = c;
          n.childNodes[1].style.background = c;
        }
        setText(
          n.lastChild,
          `${nf.format(k.n)} ${KINDS[k.kind]}, ${k.drafts ? `${k.drafts} of them ${k.drafts > 1 ? "drafts" : "a draft"}, ` : ""}${k.n > 1 ? `positions ${k.start}–${k.start + k.n - 1}` : `position ${k.start}`}`,
        );
      },
    );
  }
}
