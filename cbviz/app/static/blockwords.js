// What the block map says in words. Pure: no DOM.
// @ts-check
import { CACHED } from "./blocks.js";
import { plural } from "./format.js";

/** @import { Run } from "./store.js" */

const MOST_HOLDERS = 8;

/**
 * A block: what it is, who holds it, what happened to it in the step.
 * @param {Run} run
 * @param {number} block
 * @param {boolean} fragments free blocks lie in runs that are too short for the head of the queue
 */
export function describeBlock(run, block, fragments) {
  return whatItIs(run, block, fragments) + whyPinned(run, block) + howCopied(run, block);
}

/**
 * @param {Run} run
 * @param {number} block
 * @param {boolean} fragments
 */
function whatItIs(run, block, fragments) {
  const { blocks } = run;
  const owner = run.name(blocks.owner(block));
  const fill = `${blocks.fill(block)} of ${plural(blocks.blockSize, "slot")} filled`;
  const changed = blocks.marked[block] ? "\nchanged in this step" : "";
  switch (blocks.kind(block)) {
    case "null":
      return `block ${block}\nthe null block: never given out`;
    case "shared": {
      const holders = run.holders(block).map((row) => run.name(row));
      const more = holders.length > MOST_HOLDERS ? ", …" : "";
      const names = holders.slice(0, MOST_HOLDERS).join(", ") + more;
      return `block ${block}\nshared by ${holders.length}: ${names}\n${fill}${changed}`;
    }
    case "used": {
      const found = blocks.flags(block) & CACHED ? "\nfull, can be found by its hash" : "";
      return `block ${block}\nowned by ${owner}\n${fill}${found}${changed}`;
    }
    case "reserved":
      return `block ${block}\nreserved for ${owner}, no token yet${changed}`;
    case "cached":
      return `block ${block}\nfree, but still holds tokens of ${owner}:\na prompt that begins the same can hit it${changed}`;
    default:
      return `block ${block}\nfree${fragments ? whyTooShort(run, block) : ""}${changed}`;
  }
}

/**
 * @param {Run} run
 * @param {number} block
 */
function whyTooShort(run, block) {
  const head = run.waiting[0];
  return `, in a run of ${freeRun(run, block)}\n${run.name(head)} needs ${run.rows[head]?.need} side by side`;
}

/**
 * How many free blocks lie side by side around a free one.
 * @param {Run} run
 * @param {number} block
 */
function freeRun({ blocks }, block) {
  let first = block;
  let last = block;
  while (first > 1 && !blocks.refs(first - 1)) first--;
  while (last + 1 < blocks.numBlocks && !blocks.refs(last + 1)) last++;
  return last - first + 1;
}

/**
 * @param {Run} run
 * @param {number} block
 */
function whyPinned(run, block) {
  const { sinkBlocks } = run;
  if (!sinkBlocks || !run.blocks.refs(block)) return "";
  const pinned = run.holders(block).some((row) => run.rows[row]?.blocks.slice(0, sinkBlocks).includes(block));
  const first = plural(run.meta.sinks, "token");
  return pinned ? `\nholds attention sinks: every query sees its request's first ${first}` : "";
}

/**
 * @param {Run} run
 * @param {number} block
 */
function howCopied(run, block) {
  return run.copies
    .map(([from, to]) => {
      if (from === block) return `\ncopied to block ${to} in this step (copy-on-write)`;
      if (to === block) return `\na copy of block ${from}, made in this step (copy-on-write)`;
      return "";
    })
    .join("");
}

/**
 * The picture in words.
 * @param {Run} run
 */
export function summarizeBlocks(run) {
  const { total, used, shared, cached, free } = run.blocks.counts();
  return `Block map, ${total} blocks: ${used} in use (${shared} shared), ${cached} cached and free, ${free} free.`;
}
