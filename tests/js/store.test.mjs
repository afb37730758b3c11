// node --test tests/js : the pure modules, without a browser.
import test from "node:test";
import assert from "node:assert/strict";
import { Timeline, Blocks, Run, CACHED, NULLBLOCK, SAME_BLOCKS } from "../../cbviz/app/static/store.js";
import { gridCols } from "../../cbviz/app/static/blockmap.js";
import { shortId, seconds, percent } from "../../cbviz/app/static/format.js";
import { STATES } from "../../cbviz/app/static/color.js";
import { RoofView } from "../../cbviz/app/static/roofline.js";
import { waitText } from "../../cbviz/app/static/panels.js";

const view = (words) => {
  const a = Uint32Array.from(words);
  return new DataView(a.buffer);
};
const head = (more) => ({
  num_blocks: 8,
  block_size: 16,
  series: ["t0", "t1", "sampled"],
  meta: { clock: "modelled" },
  steps: 0,
  step: 0,
  b: [],
  ...more,
});

test("a block of 128 slots with 300 sharers survives packing", () => {
  const b = new Blocks(4, 128);
  b.apply([2, 70001, Blocks.pack(300, 128, CACHED)]);
  assert.equal(b.owner(2), 70000);
  assert.equal(b.refs(2), 300);
  assert.equal(b.fill(2), 128);
  assert.equal(b.flags(2), CACHED);
  assert.equal(b.kind(2), "shared");
  b.apply([1, 1, Blocks.pack(65535, 1024, NULLBLOCK | CACHED)]);
  assert.equal(b.refs(1), 65535);
  assert.equal(b.fill(1), 1024);
  assert.equal(b.kind(1), "null");
});

test("kinds of blocks differ, and the null block is counted apart", () => {
  const b = new Blocks(6, 16);
  b.apply([
    0,
    0,
    Blocks.pack(0, 0, NULLBLOCK),
    1,
    1,
    Blocks.pack(1, 16, CACHED),
    2,
    1,
    Blocks.pack(1, 0, 0),
    3,
    1,
    Blocks.pack(0, 16, CACHED),
    4,
    2,
    Blocks.pack(3, 16, 0),
  ]);
  assert.deepEqual(
    [0, 1, 2, 3, 4, 5].map((i) => b.kind(i)),
    ["null", "used", "reserved", "cached", "shared", "free"],
  );
  assert.deepEqual(b.counts(), { used: 3, shared: 1, reserved: 1, cached: 1, free: 1, total: 5 });
});

test("marks of the last step replace those before, and both cells are repainted", () => {
  const b = new Blocks(8);
  b.dirty = new Set();
  b.mark([1, 2]);
  b.dirty.clear();
  b.mark([2, 5]);
  assert.deepEqual([...b.marked], [0, 0, 1, 0, 0, 1, 0, 0]);
  assert.deepEqual([...b.dirty].sort(), [1, 2, 5]);
});

test("segments: found by step, states of 5 bits, the last word of a step wins, sent again changes nothing", () => {
  const t = new Timeline(2);
  t.push(0, 1, 1);
  t.push(0, 4, 2);
  t.push(0, 4, 12);
  t.push(0, 9, 3);
  t.t = 12;
  assert.equal(t.at(0, 3).state, 1);
  assert.equal(t.at(0, 4).state, 12);
  assert.deepEqual(t.at(0, 8), { state: 12, start: 4, end: 9 });
  assert.equal(t.at(0, 11).state, 3);
  assert.equal(t.at(1, 5).state, 0);
  assert.equal(t.at(0, 12), null);
  assert.equal(t.at(0, 0), null);
  const before = t.len[0];
  t.push(0, 9, 3);
  assert.equal(t.len[0], before);
  t.push(0, 100000000, 5);
  t.t = 100000002;
  assert.equal(t.at(0, 100000001).state, 5, "steps up to 2^27");
});

test("a segment that was a view into a shared buffer can be corrected without touching its neighbour", () => {
  const seg = Uint32Array.of(1 * 32 + 1, 2 * 32 + 2, 1 * 32 + 3);
  const t = Timeline.fromCSR(Uint32Array.of(0, 2, 3), seg, 5);
  t.push(0, 2, 7);
  t.push(0, 3, 6);
  assert.equal(t.at(0, 2).state, 7);
  assert.equal(t.at(0, 4).state, 6);
  assert.equal(t.at(1, 4).state, 3);
  assert.equal(seg[1], 2 * 32 + 2);
});

test("a run: history grows, the state follows the cursor, and words are cut to it", () => {
  const R = new Run(head());
  const row = (r, code, computed, outputs, blocks) => [
    r,
    code,
    computed,
    0,
    outputs,
    0,
    0,
    0,
    0,
    0,
    1,
    0,
    ...(blocks ? [blocks.length, ...blocks] : [SAME_BLOCKS]),
  ];
  const series = Float64Array.of(0, 0.5, 2);
  R.apply(
    head({
      full: true,
      steps: 1,
      step: 1,
      requests: [
        { id: "alpha", np: 5, mt: 9 },
        { id: "beta", np: 5, mt: 9 },
      ],
      out: [[0, ["Hel", "lo"], [1, 1]]],
      words: ["all seats"],
    }),
    {
      ptr: view([0, 1, 2]),
      seg: view([32 + 2, 32 + 1]),
      series: new DataView(series.buffer),
      rows: view([...row(0, 3, 6, 2, [1, 2]), 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 7]),
      words: view(new Array(16).fill(0)),
      queue: view([1, 1, 0]),
      chunks: view([0, 0, 5, 0]),
      marks: view([1, 2]),
    },
  );
  assert.equal(R.id(0), "alpha");
  assert.deepEqual(Array.from(R.rows[0].blocks), [1, 2]);
  assert.equal(R.rows[1].wait, "all seats");
  assert.deepEqual(R.waiting, [1]);
  assert.deepEqual(R.running, [0]);
  assert.deepEqual(R.holders(2), [0]);
  assert.equal(R.rate(), 4);
  R.apply(head({ steps: 2, step: 2, out: [[0, ["!"], [2]]] }), {
    tr: view([0, 2, 3]),
    rows: view(row(0, 3, 7, 3)),
  });
  assert.deepEqual(Array.from(R.rows[0].blocks), [1, 2], "a row without blocks keeps its table");
  assert.equal(R.out[0].text.slice(0, R.rows[0].outputs).join(""), "Hello!");
  assert.equal(R.tl.at(0, 2).state, 3);
  R.apply(head({ full: true, steps: 2, step: 1 }), { rows: view(row(0, 3, 6, 2, [1])) });
  assert.equal(R.rows[1], null, "not arrived at this cursor");
  assert.equal(R.out[0].text.slice(0, R.rows[0].outputs).join(""), "Hello");
  assert.equal(R.steps, 2);
});

test("block columns are multiples of 8 and fill the panel", () => {
  for (const [n, w, h] of [
    [256, 380, 215],
    [4096, 1000, 300],
    [33, 340, 200],
    [512, 200, 400],
    [16384, 380, 215],
  ]) {
    const c = gridCols(n, w, h);
    const s = (k) => Math.min(w / k, h / Math.ceil(n / k));
    assert.equal(c % 8, 0);
    for (let k = 8; k < n + 8; k += 8) {
      assert.ok(s(k) <= s(c) + 1e-9, `${n}: ${k} columns would give larger cells than ${c}`);
    }
  }
  assert.ok(gridCols(3, 300, 100) <= 3);
});

test("names and numbers", () => {
  assert.equal(shortId("r12"), "12");
  assert.equal(shortId("r1.2"), "1.2");
  assert.equal(shortId("chat-007"), "7");
  assert.equal(shortId("anna"), "ann");
  assert.equal(seconds(0.0000806), "80.6 µs");
  assert.equal(seconds(2.5), "2.50 s");
  assert.equal(seconds(NaN), "–");
  assert.equal(percent(0.126), "13 %");
  assert.equal(percent(0.004), "0.4 %");
  assert.equal(STATES.length, 15);
});

test("the words of beams follow their lineage and stay open until their search has ended, also when one looks back", () => {
  const R = new Run(head());
  const row = (r, outputs, status = 1) => [r, 3, 9, 0, outputs, 0, 0, 0, 0, 0, status, 0, SAME_BLOCKS];
  const two = (n) => view([...row(0, n), ...row(1, n), ...row(2, 1)]);
  const beams = [
    [2, [0, 1], [0, 0], ["Oh", "A"], [-1, -2]],
    [3, [0, 1], [1, 1], [" sea", " wave"], [-2.5, -2.25]],
  ];
  const of = (r) => {
    const { text, step, place, of } = R.beam(r);
    return [text.join(""), step, place, of];
  };
  R.apply(
    head({
      full: true,
      steps: 3,
      step: 3,
      requests: [
        { id: "a", np: 5, mt: 9 },
        { id: "a.1", np: 5, mt: 9, of: "a" },
        { id: "b", np: 5, mt: 9 },
      ],
      out: [[2, ["Hi"], [3]]],
      beams,
    }),
    { rows: two(2) },
  );
  assert.deepEqual(R.root, [0, 0, 2]);
  assert.deepEqual(
    [0, 1, 2].map((r) => R.searching(r)),
    [true, true, false],
  );
  assert.deepEqual(
    [of(0), of(1)],
    [
      ["A sea", [2, 3], 1, 2],
      ["A wave", [2, 3], 0, 2],
    ],
  );
  R.apply(
    head({
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
    { rows: view([...row(0, 2, 3), ...row(1, 1, 3)]) },
  );
  assert.deepEqual([R.searching(0), R.searching(1)], [false, false]);
  assert.equal(R.out[0].text.join(""), "Oh no");
  R.apply(head({ steps: 4, step: 2 }), { rows: two(1) });
  assert.deepEqual([R.searching(0), of(0), of(1)], [true, ["Oh", [2], 0, 2], ["A", [2], 1, 2]]);
});

test("the status counts requests, and sequences apart", () => {
  const R = new Run(head());
  const row = (r, status) => [r, 3, 9, 0, 1, 0, 0, 0, 0, 0, status, 0, SAME_BLOCKS];
  // b.1 is a request of its own, though its id looks like a sequence of b
  const requests = [
    { id: "a", np: 5, mt: 9 },
    { id: "a.1", np: 5, mt: 9, of: "a" },
    { id: "b", np: 5, mt: 9 },
    { id: "b.1", np: 5, mt: 9 },
  ];
  R.apply(head({ full: true, steps: 4, step: 4, requests }), {
    rows: view([...row(0, 3), ...row(1, 1), ...row(2, 3), ...row(3, 4)]),
  });
  assert.deepEqual(R.root, [0, 0, 2, 3]);
  assert.deepEqual(R.count(), { requests: 3, done: 2, sequences: 4, ended: 3 });
  R.apply(head({ steps: 5, step: 5 }), { rows: view(row(1, 3)) });
  assert.deepEqual(R.count(), { requests: 3, done: 3, sequences: 4, ended: 4 });
});

test("a point of the roofline names who decoded, with drafts or without", () => {
  const R = {
    ids: ["a", "b", "c"],
    id: (r) => "abc"[r],
    tl: { at: (r) => ({ state: STATES.indexOf(["decode", "accepted", "prefill"][r]) }) },
  };
  const who = (kind) => RoofView.prototype.who.call({ app: { R } }, { kind, step: 1 });
  assert.deepEqual([who("decode"), who("prefill"), who("both")], [["a", "b"], ["c"], ["a", "b", "c"]]);
});

test("a request of several sequences says how many seats it lacks", () => {
  const R = {
    rows: [
      { wait: "seats", need: 3, have: 2 },
      { wait: "seats", need: 1, have: 0 },
    ],
  };
  const told = [0, 1].map((r) => waitText({ R }, r));
  assert.deepEqual(told, ["its 3 sequences need a seat each, 2 free", "all seats are taken"]);
});
