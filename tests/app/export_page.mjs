// Reads an exported page without a browser: its stand-in speaks, the explorer's store listens. Says in JSON what the page would draw.
// Usage: node export_page.mjs PAGE, with a JSON list on stdin: cursors [step, event], or commands {"cmd": ...}.
import { readFileSync } from "node:fs";
import { Fold } from "../../cbviz/app/static/fold.js";
import { unpack, Recorded } from "../../cbviz/app/static/recorded.js";
import { Run, namedBuffers } from "../../cbviz/app/static/store.js";
import { STATES } from "../../cbviz/app/static/color.js";

const page = readFileSync(process.argv[2], "utf8");
const asked = JSON.parse(readFileSync(0, "utf8"));
const packed = /<script id="cbviz-run" type="text\/plain">([^<]*)<\/script>/.exec(page)[1];
const model = new Recorded(new Fold(await unpack(packed)));

/** The last message of each type, and of the pictures whether they came whole. */
const last = {};
const kinds = [];
let run = null;

function takePicture(head, buffers) {
  if (head.reset) run = new Run(head);
  run.apply(head, namedBuffers(head, buffers));
  kinds.push(head.full ? "full" : "delta");
  model.send({ type: "ack", seq: head.seq });
}

model.on("msg:custom", (message, buffers) => {
  last[message.type] = message;
  if (message.type === "picture") takePicture(message, buffers);
});

function drawnRequest(request, row) {
  return {
    state: STATES[request.code],
    computed: request.computed,
    cached: request.cached,
    outputs: request.outputs,
    preemptions: request.preemptions,
    wait: request.wait,
    end: request.end,
    status: request.status,
    blocks: Array.from(request.blocks),
    text: run.outputs[row].words.slice(0, request.outputs).join(""),
  };
}

function drawn() {
  const requests = {};
  run.rows.forEach((request, row) => {
    if (request) requests[run.id(row)] = drawnRequest(request, row);
  });
  const { why, metrics, account } = last;
  return {
    step: run.step,
    event: run.event,
    requests,
    words: Array.from(run.blocks.words),
    waiting: run.waiting.map((row) => run.id(row)),
    running: run.running.map((row) => run.id(row)),
    chunks: run.chunks.map(({ row, start, tokens, kind }) => [run.id(row), start, tokens, kind]),
    marks: Array.from(run.blocks.marks),
    pad: run.pad,
    config: run.config,
    experts: run.experts,
    why: why.items,
    whyStep: why.step,
    numEvents: why.num_events,
    moment: why.moment ?? null,
    account: account ?? null,
    metrics: metrics ? metrics.values : null,
    metricSteps: metrics ? metrics.steps : null,
  };
}

function segmentsOf(row) {
  const { rows, lengths } = run.timeline;
  return Array.from(rows[row].subarray(0, lengths[row]), (word) => [word >>> 5, word & 31]);
}

model.send({ type: "ready" });
const pictures = [drawn()];
for (const one of asked) {
  if (Array.isArray(one)) model.go(...one);
  else model.send({ type: "cmd", ...one });
  pictures.push(drawn());
}
process.stdout.write(
  JSON.stringify({
    drawn: pictures,
    kinds,
    live: last.live.live,
    ids: run.ids,
    info: run.requests,
    steps: run.steps,
    series: run.series,
    segments: run.ids.map((_, row) => segmentsOf(row)),
  }),
);
