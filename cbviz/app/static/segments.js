// The timeline's data: what each request was at each step, as run-length segments. Pure: no DOM.
// @ts-check

const NO_SEGMENTS = new Uint32Array(0);

/**
 * Segments a row, one word each: step * 32 + state. Steps are below 2^27, states below 32.
 * Step s covers [s - .5, s + .5]; the first step is 1.
 */
export class Timeline {
  /** @param {number} [numRows] */
  constructor(numRows = 0) {
    this.numRows = 0;
    /** @type {Uint32Array[]} may be longer than what is used of them (`lengths`) */
    this.rows = [];
    /** @type {number[]} */
    this.lengths = [];
    /** The first step that is not recorded. */
    this.end = 1;
    this.grow(numRows);
  }

  /**
   * Rows are views into one buffer: no copy a row.
   * @param {Uint32Array} pointers where each row begins in `segments`, and where the last one ends
   * @param {Uint32Array} segments
   * @param {number} end
   */
  static fromPointers(pointers, segments, end) {
    const timeline = new Timeline(pointers.length - 1);
    for (let row = 0; row < timeline.numRows; row++) {
      timeline.rows[row] = segments.subarray(pointers[row], pointers[row + 1]);
      timeline.lengths[row] = pointers[row + 1] - pointers[row];
    }
    timeline.end = end;
    return timeline;
  }

  /** @param {number} numRows */
  grow(numRows) {
    while (this.numRows < numRows) {
      this.rows.push(NO_SEGMENTS);
      this.lengths.push(0);
      this.numRows++;
    }
  }

  /**
   * From `step` on, `row` is in `state`. Sent again, or the same step corrected: the last word wins.
   * @param {number} row
   * @param {number} step
   * @param {number} state
   */
  push(row, step, state) {
    this.grow(row + 1);
    const word = step * 32 + state;
    const length = this.lengths[row];
    if (length && this.rows[row][length - 1] >>> 5 >= step && this.correct(row, step, word)) return;
    if (length === this.rows[row].length) {
      const longer = new Uint32Array(Math.max(16, length * 2));
      longer.set(this.rows[row]);
      this.rows[row] = longer;
    }
    this.rows[row][length] = word;
    this.lengths[row] = length + 1;
  }

  /**
   * Writes over the segment that begins at `step`; false: there is none.
   * @param {number} row
   * @param {number} step
   * @param {number} word
   */
  correct(row, step, word) {
    const segments = this.rows[row];
    let i = this.lengths[row];
    while (i && segments[i - 1] >>> 5 > step) i--;
    if (!i || segments[i - 1] >>> 5 !== step) return false;
    if (segments[i - 1] !== word) {
      // A copy: the row may be a view into a buffer that it shares with its neighbours.
      this.rows[row] = segments.slice();
      this.rows[row][i - 1] = word;
    }
    return true;
  }

  /** @param {Uint32Array} words row, step, state; row, step, state; ... */
  pushAll(words) {
    for (let i = 0; i + 2 < words.length; i += 3) this.push(words[i], words[i + 1], words[i + 2]);
  }

  /**
   * Index of the segment of `row` that covers `step`, or -1.
   * @param {number} row
   * @param {number} step
   */
  find(row, step) {
    const segments = this.rows[row];
    const last = step * 32 + 31;
    let low = 0;
    let high = this.lengths[row];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (segments[middle] <= last) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /**
   * The state of `row` at `step`, and from which step to which it lasts (`end`: the first that is another).
   * @param {number} row
   * @param {number} step
   * @returns {{ state: number, start: number, end: number } | null} null: not recorded
   */
  at(row, step) {
    if (row < 0 || row >= this.numRows || step < 1 || step >= this.end) return null;
    const segments = this.rows[row];
    const length = this.lengths[row];
    const i = this.find(row, step);
    if (i < 0) return { state: 0, start: 1, end: length ? segments[0] >>> 5 : this.end };
    return {
      state: segments[i] & 31,
      start: segments[i] >>> 5,
      end: i + 1 < length ? Math.min(this.end, segments[i + 1] >>> 5) : this.end,
    };
  }
}
