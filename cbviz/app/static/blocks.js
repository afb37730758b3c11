// The pool at the cursor: two words a block. Pure: no DOM.
// @ts-check

export const CACHED = 1;
export const NULLBLOCK = 2;

/** @typedef {"null" | "shared" | "used" | "reserved" | "cached" | "free"} BlockKind */

/**
 * First word: owner + 1 (0: nobody ever). Second word: sharers (16 bits) << 16 | filled slots (12) << 4 | flags (4).
 */
export class Blocks {
  /**
   * @param {number} numBlocks
   * @param {number} [blockSize] slots a block
   */
  constructor(numBlocks, blockSize = 16) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.words = new Uint32Array(2 * numBlocks);
    /** 1: the last step changed the block. */
    this.marked = new Uint8Array(numBlocks);
    /** @type {ArrayLike<number> & Iterable<number>} */
    this.marks = [];
    /** @type {Set<number> | null} changed since the last paint; null: all */
    this.dirty = null;
  }

  /** @param {number} block */
  owner(block) {
    return this.words[2 * block] - 1;
  }

  /** @param {number} block */
  refs(block) {
    return this.words[2 * block + 1] >>> 16;
  }

  /** @param {number} block */
  fill(block) {
    return (this.words[2 * block + 1] >>> 4) & 4095;
  }

  /** @param {number} block */
  flags(block) {
    return this.words[2 * block + 1] & 15;
  }

  /**
   * @param {number} block
   * @returns {BlockKind}
   */
  kind(block) {
    const refs = this.refs(block);
    if (this.flags(block) & NULLBLOCK) return "null";
    if (refs > 1) return "shared";
    if (refs) return this.fill(block) ? "used" : "reserved";
    return this.flags(block) & CACHED ? "cached" : "free";
  }

  /**
   * The second word of a block.
   * @param {number} refs
   * @param {number} fill
   * @param {number} flags
   */
  static pack(refs, fill, flags) {
    return ((refs << 16) | (fill << 4) | flags) >>> 0;
  }

  /** @param {Uint32Array} words those of all blocks */
  replace(words) {
    this.words.set(words);
    this.dirty = null;
  }

  /** @param {ArrayLike<number>} changes block and its two words, again and again */
  apply(changes) {
    for (let i = 0; i + 2 < changes.length; i += 3) {
      const block = changes[i];
      this.words[2 * block] = changes[i + 1];
      this.words[2 * block + 1] = changes[i + 2];
      this.dirty?.add(block);
    }
  }

  /**
   * Marks what the last step changed, in place of what was marked before.
   * @param {ArrayLike<number> & Iterable<number>} blocks
   */
  mark(blocks) {
    for (const block of this.marks) {
      this.marked[block] = 0;
      this.dirty?.add(block);
    }
    for (const block of blocks) {
      this.marked[block] = 1;
      this.dirty?.add(block);
    }
    this.marks = blocks;
  }

  /** How many blocks are what; the null block counts as none. */
  counts() {
    let used = 0;
    let shared = 0;
    let reserved = 0;
    let cached = 0;
    let never = 0;
    for (let block = 0; block < this.numBlocks; block++) {
      const word = this.words[2 * block + 1];
      const refs = word >>> 16;
      if (word & NULLBLOCK) {
        never++;
      } else if (refs) {
        used++;
        if (refs > 1) shared++;
        else if (!((word >>> 4) & 4095)) reserved++;
      } else if (word & CACHED) {
        cached++;
      }
    }
    const total = this.numBlocks - never;
    return { used, shared, reserved, cached, free: total - used - cached, total };
  }
}
