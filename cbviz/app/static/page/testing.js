// What tests read: what has been decoded and drawn, not what the kernel meant. A frame that is due is painted first.
// @ts-check
import { CACHED } from "../blocks.js";
import { STATES } from "../color.js";

/** @import { Run } from "../store.js" */
/** @import { Inbox } from "./inbox.js" */
/** @import { Painter } from "./painter.js" */
/** @import { App } from "./state.js" */

/**
 * Puts `cbviz` into the window.
 * @param {App} app
 * @param {Painter} painter
 * @param {Inbox} inbox
 */
export function exposeForTests(app, painter, inbox) {
  const cbviz = {
    app,
    frames: () => app.frames,
    idle: () => inbox.queue.then(() => painter.flushNow()),
    /** @param {string} id */
    text(id) {
      const { run } = app;
      const row = run.index.get(id) ?? -1;
      return run.outputs[row].words.slice(0, run.rows[row]?.outputs ?? 0).join("");
    },
    state() {
      if (!app.current) return null;
      painter.flushNow();
      return drawnState(app, app.current);
    },
  };
  Object.assign(globalThis, { cbviz });
}

/**
 * @param {App} app
 * @param {Run} run
 */
function drawnState(app, run) {
  const { blocks } = run;
  const all = Array.from({ length: blocks.numBlocks }, (_, block) => block);
  return {
    step: run.step,
    event: run.event,
    steps: run.steps,
    requests: Object.fromEntries(drawnRequests(run)),
    owners: all.map((block) => (blocks.refs(block) ? run.id(blocks.owner(block)) : null)),
    refs: all.map((block) => blocks.refs(block)),
    fills: all.map((block) => blocks.fill(block)),
    cached: all.map((block) => !!(blocks.flags(block) & CACHED)),
    waiting: run.waiting.map((row) => run.id(row)),
    running: run.running.map((row) => run.id(row)),
    playing: !!app.live.playing,
    selected: app.selected >= 0 ? run.id(app.selected) : null,
    branch: app.branch,
  };
}

/** @param {Run} run */
function drawnRequests(run) {
  return run.rows.flatMap((request, row) => {
    if (!request) return [];
    const drawn = {
      state: STATES[request.code],
      num_computed_tokens: request.computed,
      output_tokens: request.outputs,
      blocks: Array.from(request.blocks),
      num_preemptions: request.preemptions,
    };
    return [[run.id(row), drawn]];
  });
}
