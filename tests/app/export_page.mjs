// Reads an exported page without a browser: its stand-in speaks, the explorer's store listens. Says in JSON what the page would draw.
// Usage: node export_page.mjs PAGE, with a JSON list on stdin: cursors [step, event], or commands {"cmd": ...}.
import { readFileSync } from "node:fs";
import { unpack, Fold, Recorded } from "../../cbviz/app/static/recorded.js";
import { Run } from "../../cbviz/app/static/store.js";
import { STATES } from "../../cbviz/app/static/color.js";
const page = readFileSync(process.argv[2], "utf8"),
  asked = JSON.parse(readFileSync(0, "utf8"));
const fold = new Fold(
    await unpack(/<script id="cbviz-run" type="text\/plain">([^<]*)<\/script>/.exec(page)[1]),
  ),
  model = new Recorded(fold);
let R = null,
  why = null,
  metrics = null,
  account = null,
  live = null;
const kinds = [];
model.on("msg:custom", (m, bufs) => {
  if (m.type === "picture") {
    const buf = {};
    m.b.forEach((n, i) => {
      buf[n] = bufs[i];
    });
    if (m.reset) R = new Run(m);
    R.apply(m, buf);
    kinds.push(m.full ? "full" : "delta");
    model.send({ type: "ack", seq: m.seq });
  } else if (m.type === "why") why = m;
  else if (m.type === "metrics") metrics = m;
  else if (m.type === "account") account = m;
  else if (m.type === "live") live = m.live;
});
function drawn() {
  const requests = {};
  R.rows.forEach((q, r) => {
    if (q)
      requests[R.id(r)] = {
        state: STATES[q.code],
        computed: q.computed,
        cached: q.cached,
        outputs: q.outputs,
        preemptions: q.preemptions,
        wait: q.wait,
        end: q.end,
        status: q.status,
        blocks: Array.from(q.blocks),
        text: R.out[r].text.slice(0, q.outputs).join(""),
      };
  });
  return {
    step: R.step,
    event: R.event,
    requests,
    words: Array.from(R.bl.w),
    waiting: R.waiting.map((r) => R.id(r)),
    running: R.running.map((r) => R.id(r)),
    chunks: R.chunks.map((k) => [R.id(k.r), k.start, k.n, k.kind]),
    marks: R.bl.marks,
    pad: R.pad,
    config: R.config,
    experts: R.experts,
    why: why.items,
    whyStep: why.step,
    numEvents: why.num_events,
    moment: why.moment ?? null,
    account,
    metrics: metrics && metrics.values,
    metricSteps: metrics && metrics.steps,
  };
}
model.send({ type: "ready" });
const out = [drawn()];
for (const a of asked) {
  if (Array.isArray(a)) model.go(...a);
  else model.send({ type: "cmd", ...a });
  out.push(drawn());
}
process.stdout.write(
  JSON.stringify({
    drawn: out,
    kinds,
    live,
    ids: R.ids,
    info: R.info,
    steps: R.steps,
    series: R.series,
    segments: R.ids.map((_, r) =>
      Array.from(R.tl.rows[r].subarray(0, R.tl.len[r]), (w) => [w >>> 5, w & 31]),
    ),
  }),
);
