// When what is painted: pictures in every animation frame, words as often as they can be read, alternatives for those who don't see them now and then.
// @ts-check

/** @import { BatchBar } from "../batch.js" */
/** @import { WordPanel } from "../page.js" */
/** @import { App } from "./state.js" */

/** Pictures closer than this, in milliseconds, come too fast to read the words of each. */
const FAST = 150;
/** Least milliseconds between two paintings of words while pictures come fast, and how much of the time words may take. */
const WORDS_EVERY = 200;
const WORDS_SHARE = 1 / 5;
/** Milliseconds between two descriptions of the canvases. */
const DESCRIBE_EVERY = 2000;

export class Painter {
  /**
   * @param {App} app
   * @param {BatchBar} bar
   * @param {{ words: WordPanel[], head: () => void, seriesShown: () => boolean }} parts
   *   `head`: paints what is said above and below the pictures
   */
  constructor(app, bar, { words, head, seriesShown }) {
    this.app = app;
    this.bar = bar;
    this.words = words;
    this.head = head;
    this.seriesShown = seriesShown;
    this.dead = false;
    /** The animation frame that was asked for; 0: none. */
    this.frame = 0;
    /** A picture has come since the last frame, and it was of another run. */
    this.advanced = false;
    this.reset = false;
    this.lastPictureAt = 0;
    this.wordsAt = 0;
    this.wordsTimer = 0;
    /** Milliseconds that painting all words took. */
    this.wordsCost = 0;
    this.describedAt = 0;
    this.describeTimer = 0;
  }

  /** Asks for an animation frame. */
  request() {
    if (!this.frame && !this.dead) this.frame = requestAnimationFrame(() => this.flush());
  }

  /** @param {boolean} reset the run is another one */
  pictureCame(reset) {
    this.advanced = true;
    this.reset = this.reset || reset;
  }

  /** Paints a frame that was asked for at once. */
  flushNow() {
    if (!this.frame) return;
    cancelAnimationFrame(this.frame);
    this.flush();
  }

  flush() {
    this.frame = 0;
    const { app } = this;
    const { views } = app;
    if (this.dead || !views) return;
    app.kernel.acknowledge(); // when the frame starts: the kernel works while we paint
    const now = performance.now();
    if (this.advanced) {
      this.advanced = false;
      const fast = !!app.live.playing && now - this.lastPictureAt < FAST;
      this.lastPictureAt = now;
      views.advance(this.reset);
      this.reset = false;
      this.bar.dirty = true;
      this.paintWordsInTime(now, fast);
    }
    const timeline = views.timeline.frame.flush();
    const blocks = views.blocks.frame.flush();
    if (this.seriesShown()) views.series.frame.flush();
    if (views.roofline.shown) views.roofline.frame.flush();
    this.bar.paint();
    if (timeline || blocks) app.frames++;
    this.describeInTime(now);
  }

  /**
   * Words as often as they can be read, and never for more than a fifth of the time.
   * @param {number} now
   * @param {boolean} fast
   */
  paintWordsInTime(now, fast) {
    const gap = fast ? Math.max(WORDS_EVERY, this.wordsCost / WORDS_SHARE) : 0;
    const left = gap - (now - this.wordsAt);
    if (left <= 0) {
      this.head();
      this.paintWords();
      this.wordsCost = performance.now() - now;
      return;
    }
    if (this.wordsTimer) return;
    this.wordsTimer = setTimeout(() => {
      this.head();
      this.paintWords();
      this.request();
    }, left);
  }

  paintWords() {
    clearTimeout(this.wordsTimer);
    this.wordsTimer = 0;
    this.wordsAt = performance.now();
    if (!this.app.current) return;
    for (const panel of this.words) panel.draw();
  }

  /** @param {number} now */
  describeInTime(now) {
    if (this.describeTimer) return;
    const left = this.describedAt + DESCRIBE_EVERY - now;
    if (left > 0) this.describeTimer = setTimeout(() => this.describe(), left);
    else this.describe();
  }

  /** What the canvases show, in words: every two seconds at most, and at last what they show when they rest. */
  describe() {
    this.describeTimer = 0;
    this.describedAt = performance.now();
    const { views } = this.app;
    if (this.dead || !views) return;
    views.timeline.frame.under.setAttribute("aria-label", views.timeline.summary());
    views.blocks.frame.under.setAttribute("aria-label", views.blocks.summary());
    this.bar.canvas.setAttribute("aria-label", this.bar.summary());
  }

  destroy() {
    this.dead = true;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.wordsTimer);
    clearTimeout(this.describeTimer);
  }
}
