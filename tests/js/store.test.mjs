// The run that the page holds: what pictures make of it, and what it says.
import test from "node:test";
import assert from "node:assert/strict";
import { Run } from "../../cbviz/app/static/store.js";
import { FINISHED, REFUSED, floats, picture, request, row, words } from "./helpers.mjs";

/** A run after its first picture: alpha runs with two words in blocks 1 and 2, beta waits. */
function runOfTwo() {
  const run = new Run(picture());
  run.apply(
    picture({
      full: true,
      steps: 1,
      step: 1,
      requests: [request("alpha"), request("beta")],
      out: [[0, ["Hel", "lo"], [1, 1]]],
      words: ["all seats"],
    }),
    {
      ptr: words([0, 1, 2]),
      seg: words([32 + 2, 32 + 1]),
      series: floats([0, 0.5, 2]),
      rows: words([
        ...row(0, { computed: 6, outputs: 2, blocks: [1, 2] }),
        ...row(1, { state: 1, wait: 1, status: 0, blocks: [7] }),
      ]),
      words: words(new Array(16).fill(0)),
      queue: words([1, 1, 0]),
      chunks: words([0, 0, 5, 0]),
      marks: words([1, 2]),
    },
  );
  return run;
}

const textOf = (run, index) => run.outputs[index].words.slice(0, run.rows[index].outputs).join("");

test("the first picture brings requests, their state, the queues and the figures", () => {
  const run = runOfTwo();

  assert.deepEqual(run.ids, ["alpha", "beta"]);
  assert.deepEqual(Array.from(run.rows[0].blocks), [1, 2]);
  assert.equal(run.rows[1].wait, "all seats");
  assert.deepEqual(run.waiting, [1]);
  assert.deepEqual(run.running, [0]);
  assert.deepEqual(run.holders(2), [0]);
  assert.deepEqual(run.chunks, [{ row: 0, start: 0, tokens: 5, kind: 0, drafts: 0 }]);
  assert.equal(run.rate(), 4);
});

test("the history grows, and a row without blocks keeps its table", () => {
  const run = runOfTwo();

  run.apply(picture({ steps: 2, step: 2, out: [[0, ["!"], [2]]] }), {
    tr: words([0, 2, 3]),
    rows: words(row(0, { computed: 7, outputs: 3 })),
  });

  assert.deepEqual(Array.from(run.rows[0].blocks), [1, 2]);
  assert.equal(textOf(run, 0), "Hello!");
  assert.equal(run.timeline.at(0, 2).state, 3);
});

test("a cursor that goes back cuts the words and the requests, not the history", () => {
  const run = runOfTwo();
  run.apply(picture({ steps: 2, step: 2, out: [[0, ["!"], [2]]] }), {
    rows: words(row(0, { computed: 7, outputs: 3 })),
  });

  run.apply(picture({ full: true, steps: 2, step: 1 }), {
    rows: words(row(0, { computed: 6, outputs: 2, blocks: [1] })),
  });

  assert.equal(run.rows[1], null, "not arrived at this cursor");
  assert.equal(textOf(run, 0), "Hello");
  assert.equal(run.steps, 2);
});

test("buffers that lie askew are read like others", () => {
  const run = runOfTwo();
  const askew = new Uint8Array(4 * 3 + 1);
  askew.set(new Uint8Array(words([1, 1, 0]).buffer), 1);

  run.apply(picture({ steps: 1, step: 1 }), { queue: new DataView(askew.buffer, 1) });

  assert.deepEqual([run.waiting, run.running], [[1], [0]]);
});

// beams ------------------------------------------------------------------------------------------------------

/** Two beams of request a that have chosen twice, and request b beside them. The lineages cross at the second choice. */
function runOfBeams() {
  const run = new Run(picture());
  const beams = [
    [2, [0, 1], [0, 0], ["Oh", "A"], [-1, -2]],
    [3, [0, 1], [1, 1], [" sea", " wave"], [-2.5, -2.25]],
  ];
  const requests = [request("a"), request("a.1", { of: "a" }), request("b")];
  run.apply(picture({ full: true, steps: 3, step: 3, requests, out: [[2, ["Hi"], [3]]], beams }), {
    rows: beamRows(2),
  });
  return run;
}

const beamRows = (outputs) =>
  words([...row(0, { outputs }), ...row(1, { outputs }), ...row(2, { outputs: 1 })]);

function beamOf(run, index) {
  const { words: said, steps, place, of } = run.beam(index);
  return { text: said.join(""), steps, place, of };
}

test("the words of beams follow their lineage, and the best one is first", () => {
  const run = runOfBeams();

  assert.deepEqual(run.root, [0, 0, 2]);
  assert.deepEqual(
    [0, 1, 2].map((index) => run.searching(index)),
    [true, true, false],
  );
  assert.deepEqual(beamOf(run, 0), { text: "A sea", steps: [2, 3], place: 1, of: 2 });
  assert.deepEqual(beamOf(run, 1), { text: "A wave", steps: [2, 3], place: 0, of: 2 });
});

test("a search that has ended is open again only for who looks back", () => {
  const run = runOfBeams();

  run.apply(
    picture({
      steps: 4,
      step: 4,
      out: [
        [0, ["Oh", " no"], [2, 4]],
        [1, ["A"], [2]],
      ],
      ended: [
        [0, 4],
        [1, 4],
      ],
    }),
    {
      rows: words([...row(0, { outputs: 2, status: FINISHED }), ...row(1, { outputs: 1, status: FINISHED })]),
    },
  );
  assert.deepEqual([run.searching(0), run.searching(1)], [false, false]);
  assert.equal(run.outputs[0].words.join(""), "Oh no");

  run.apply(picture({ steps: 4, step: 2 }), { rows: beamRows(1) });
  assert.equal(run.searching(0), true);
  assert.deepEqual(beamOf(run, 0), { text: "Oh", steps: [2], place: 0, of: 2 });
  assert.deepEqual(beamOf(run, 1), { text: "A", steps: [2], place: 1, of: 2 });
});

test("the status counts requests, and sequences apart", () => {
  const run = new Run(picture());
  // b.1 is a request of its own, though its id looks like a sequence of b.
  const requests = [request("a"), request("a.1", { of: "a" }), request("b"), request("b.1")];
  run.apply(picture({ full: true, steps: 4, step: 4, requests }), {
    rows: words([
      ...row(0, { outputs: 1, status: FINISHED }),
      ...row(1, { outputs: 1 }),
      ...row(2, { outputs: 1, status: FINISHED }),
      ...row(3, { outputs: 1, status: REFUSED }),
    ]),
  });
  assert.deepEqual(run.root, [0, 0, 2, 3]);
  assert.deepEqual(run.count(), { requests: 3, done: 2, sequences: 4, ended: 3 });

  run.apply(picture({ steps: 5, step: 5 }), { rows: words(row(1, { outputs: 1, status: FINISHED })) });
  assert.deepEqual(run.count(), { requests: 3, done: 3, sequences: 4, ended: 4 });
});
