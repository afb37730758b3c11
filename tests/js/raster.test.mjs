// The painter of the timeline writes into an array of pixels; each test has a control that must fail.
import test from "node:test";
import assert from "node:assert/strict";
import { RANK, STATES, THEMES, UNRANK, statePixels } from "../../cbviz/app/static/color.js";
import { paintTimeline } from "../../cbviz/app/static/raster.js";
import { Timeline } from "../../cbviz/app/static/segments.js";
import { seededRandom } from "./helpers.mjs";

const random = seededRandom(7);
const colors = statePixels(THEMES.light);
const RATIOS = [1, 1.25, 2];

/** A timeline of random states, `changes` of them a row. */
function randomTimeline(numRows, numSteps, changes = 6) {
  const timeline = new Timeline(numRows);
  timeline.end = numSteps + 1;
  for (let row = 0; row < numRows; row++) {
    const steps = Array.from({ length: changes }, () => 1 + Math.floor(random() * numSteps));
    let state = 0;
    for (const step of [...new Set(steps)].sort((a, b) => a - b)) {
      state = 1 + ((state + Math.floor(random() * 10)) % 12);
      timeline.push(row, step, state);
    }
  }
  return timeline;
}

/** Whether a pixel has a colour of a state; on very thin rows a finished request is background. */
function isColorOf(pixel, state) {
  const rank = RANK[state];
  if (pixel === colors.plain[rank] || pixel === colors.texture[rank]) return true;
  return STATES[state] === "finished" && pixel === colors.plain[0];
}

/** How many cells' centres on screen have not their state's colour, if one looks `shift` pixels beside them. */
function wrongCentres(pixels, width, height, timeline, view, shift = 0) {
  const perStep = width / (view.x1 - view.x0);
  const perRow = height / (view.y1 - view.y0);
  let wrong = 0;
  let seen = 0;
  for (let row = Math.max(0, Math.ceil(view.y0)); row <= view.y1 && row < timeline.numRows; row++) {
    for (let step = Math.max(1, Math.ceil(view.x0)); step <= view.x1 && step < timeline.end; step++) {
      const x = Math.floor((step - view.x0) * perStep) + shift;
      const y = Math.floor((row - view.y0) * perRow);
      if (x < 0 || x >= width || y >= height) continue;
      seen++;
      if (!isColorOf(pixels[y * width + x], timeline.at(row, step).state)) wrong++;
    }
  }
  return { wrong, seen };
}

test("ranks are a permutation of the states", () => {
  const states = STATES.map((_, state) => state);

  assert.deepEqual(
    [...RANK].sort((a, b) => a - b),
    states,
  );
  for (const state of states) assert.equal(UNRANK[RANK[state]], state);
});

test("every cell's centre has its state's colour, for all row heights, pixel ratios and offsets", () => {
  let cells = 0;
  let noticed = 0;
  for (const ratio of RATIOS) {
    for (const numRows of [1, 3, 8, 20, 32, 64, 120]) {
      for (const offset of [0, 0.3, 7.77]) {
        const width = Math.round(640 * ratio);
        const height = Math.round(258 * ratio);
        const timeline = randomTimeline(numRows, 100);
        const pixels = new Uint32Array(width * height);
        const down = offset / 20;
        const view = { x0: 0.5 + offset, x1: 100.5 + offset, y0: -0.5 + down, y1: numRows - 0.5 + down };

        paintTimeline(pixels, width, height, timeline, view, colors, ratio);

        const { wrong, seen } = wrongCentres(pixels, width, height, timeline, view);
        assert.equal(
          wrong,
          0,
          `${wrong} of ${seen} cells, ratio ${ratio}, ${numRows} rows, offset ${offset}`,
        );
        cells += seen;
        const twoCells = Math.round((2 * width) / 100);
        noticed += wrongCentres(pixels, width, height, timeline, view, twoCells).wrong;
      }
    }
  }
  assert.ok(cells > 50000);
  assert.ok(noticed > cells / 20, "control: a shift by two cells must be noticed");
});

/** The highest rank in each pixel, worked out cell by cell. */
function highestRanks(timeline, width, height) {
  const numSteps = timeline.end - 1;
  const ranks = new Uint8Array(width * height);
  const edge = (step) => Math.round((step - 1) * (width / numSteps));
  for (let row = 0; row < timeline.numRows; row++) {
    const y = Math.floor((row + 0.5) * (height / timeline.numRows));
    for (let step = 1; step <= numSteps;) {
      const { state, end } = timeline.at(row, step);
      const first = edge(step);
      const last = Math.max(first + 1, edge(end));
      for (let x = first; x < last && x < width; x++) {
        ranks[y * width + x] = Math.max(ranks[y * width + x], RANK[state]);
      }
      step = end;
    }
  }
  return ranks;
}

test("zoomed out, a pixel shows the highest rank of the cells it covers", () => {
  const [numRows, numSteps, width, height] = [300, 2000, 97, 41];
  const timeline = randomTimeline(numRows, numSteps, 40);
  const pixels = new Uint32Array(width * height);
  const view = { x0: 0.5, x1: numSteps + 0.5, y0: -0.5, y1: numRows - 0.5 };

  paintTimeline(pixels, width, height, timeline, view, colors, 1);

  const ranks = highestRanks(timeline, width, height);
  const wrong = pixels.filter((pixel, i) => pixel !== (ranks[i] > 1 ? colors.plain[ranks[i]] : 0)).length;
  // Neighbouring segments of one state are each at least a pixel wide.
  assert.ok(wrong <= pixels.length * 0.01, `${wrong} of ${pixels.length} pixels differ`);
});

for (const ratio of RATIOS) {
  for (const numRows of [4, 32, 300]) {
    test(`a partial repaint is bit-equal to the full one: ratio ${ratio}, ${numRows} rows`, () => {
      const width = Math.round(500 * ratio);
      const height = Math.round(200 * ratio);
      const timeline = randomTimeline(numRows, 150);
      const full = new Uint32Array(width * height);
      const part = new Uint32Array(width * height);
      const view = { x0: 3.3, x1: 133.3, y0: -0.5, y1: numRows - 0.5 };
      paintTimeline(full, width, height, timeline, view, colors, ratio);

      for (const [first, last] of [
        [0, 5],
        [37, 120],
        [width - 9, width],
      ]) {
        paintTimeline(part, width, height, timeline, view, colors, ratio, first, last);

        const columns = last - first;
        for (let y = 0; y < height; y++) {
          const painted = part.subarray(y * columns, (y + 1) * columns);
          const wanted = full.subarray(y * width + first, y * width + last);
          assert.ok(
            painted.every((pixel, x) => pixel === wanted[x]),
            `row ${y} of columns ${first} to ${last}`,
          );
        }
      }
    });
  }
}

test("textures and thin bars are there from 3 px of bar height on", () => {
  const [numRows, width, height] = [60, 400, 300];
  const preempted = STATES.indexOf("preempted");
  const waiting = STATES.indexOf("waiting");
  const pixels = new Uint32Array(width * height);
  const timeline = new Timeline(numRows);
  for (let row = 0; row < numRows; row++) timeline.push(row, 1, row % 2 ? preempted : waiting);
  timeline.end = 101;

  const view = { x0: 0.5, x1: 100.5, y0: -0.5, y1: numRows - 0.5 };
  paintTimeline(pixels, width, height, timeline, view, colors, 1);

  const count = (color) => pixels.filter((pixel) => pixel === color).length;
  const plain = (state) => count(colors.plain[RANK[state]]);
  const texture = (state) => count(colors.texture[RANK[state]]);
  assert.ok(plain(preempted) > 1000 && texture(preempted) > 500, "both colours of the hatch");
  const high = plain(preempted) + texture(preempted);
  assert.ok(plain(waiting) + texture(waiting) < 0.8 * high, "a waiting bar is thinner");
});

/** 10,000 requests over 100,000 steps, eight segments each, later requests later. */
function hugeTimeline(numRows, segmentsEach) {
  const states = [1, 2, 3, 4, 2, 3, 5, 6];
  const pointers = Uint32Array.from({ length: numRows + 1 }, (_, row) => row * segmentsEach);
  const segments = new Uint32Array(numRows * segmentsEach);
  for (let row = 0; row < numRows; row++) {
    let step = 1 + row * 9;
    for (let i = 0; i < segmentsEach; i++) {
      segments[row * segmentsEach + i] = step * 32 + states[i];
      step += 1 + Math.floor(random() * 400);
    }
  }
  return Timeline.fromPointers(pointers, segments, 100001);
}

test("of 10,000 requests and 100,000 steps the cost follows the screen", () => {
  const [numRows, segmentsEach, width, height] = [10000, 8, 1300, 260];
  const timeline = hugeTimeline(numRows, segmentsEach);
  const pixels = new Uint32Array(width * height);
  const visited = (view) => paintTimeline(pixels, width, height, timeline, view, colors, 1);

  const far = visited({ x0: 0.5, x1: 100000.5, y0: -0.5, y1: 9999.5 });
  const near = visited({ x0: 90000.5, x1: 90100.5, y0: 9000.5, y1: 9030.5 });

  assert.ok(far <= numRows * segmentsEach, `${far} segments visited`);
  assert.ok(near < 400, `${near} segments visited`);
});
