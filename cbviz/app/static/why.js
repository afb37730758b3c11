// Why the step went as it did: why the run stopped here, the event that the cursor has passed, what was asked about, and all sentences.
// @ts-check
import { element, setText } from "./dom.js";
import { grouped } from "./format.js";
import { sentence, sentenceLines } from "./sentences.js";

/** @import { App } from "./page/state.js" */
/** @import { Stop, Why } from "./messages.js" */

const BEFORE_FIRST =
  "Each step is explained here: who was admitted, who waits and for what, who was preempted and why.";
const NOTHING = "Nothing was decided in this step but to go on.";

export class WhyPanel {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   * @param {HTMLElement} title of the panel
   */
  constructor(host, app, title) {
    this.app = app;
    this.title = title;
    this.list = element("ol", { class: "cb-sentences" });
    this.none = element("p", { class: "cb-empty" });
    this.stop = element("div", { class: "cb-stop", hidden: true });
    this.moment = element("p", { class: "cb-moment", hidden: true });
    this.aboutTitle = element("span");
    this.aboutList = element("ol", { class: "cb-sentences" });
    this.about = element(
      "details",
      { class: "cb-about", open: true, hidden: true },
      element("summary", {}, this.aboutTitle),
      this.aboutList,
    );
    host.append(this.stop, this.moment, this.about, this.none, this.list);
    // What stands on the page already.
    /** @type {Why | null} */
    this.shown = null;
    /** @type {number | null} */
    this.shownEvent = null;
    /** @type {Stop | null} */
    this.shownStop = null;
    /** @type {Why | null} the sentences beside which the stop stands */
    this.stopBeside = null;
    /** @type {Why["moment"] | null} */
    this.shownMoment = null;
    /** @type {Why["about"] | null} */
    this.shownAbout = null;
  }

  draw() {
    const { run, why } = this.app;
    const now = why?.step === run.step ? why : null;
    this.drawTitle(!now);
    this.drawStop(now);
    this.drawMoment(now);
    this.drawAbout(now);
    this.drawNone(now);
    if (!run.step) {
      this.list.replaceChildren();
      this.shown = null;
      return;
    }
    if (!now || (this.shown === now && this.shownEvent === run.event)) return;
    this.shown = now;
    this.shownEvent = run.event;
    this.list.replaceChildren(...sentenceLines(this.app, now.items));
  }

  /** @param {boolean} late the sentences of this step have not come yet: those of another one stand here */
  drawTitle(late) {
    const { step } = this.app.run;
    const explained = late && this.shown ? this.shown.step : step;
    setText(this.title, step ? `Why, step ${grouped(explained)}` : "Why");
  }

  /** @param {Why | null} now */
  drawNone(now) {
    let text = "";
    if (!this.app.run.step) text = BEFORE_FIRST;
    else if (now && !now.items.length) text = NOTHING;
    setText(this.none, text);
    this.none.hidden = !text;
  }

  /**
   * Why the run stopped here.
   * @param {Why | null} now
   */
  drawStop(now) {
    const { run, stop } = this.app;
    const here = stop && stop.step === run.step ? stop : null;
    this.stop.hidden = !here;
    if (here === this.shownStop && (!here || now === this.stopBeside)) return;
    this.shownStop = here;
    this.stopBeside = now;
    if (!here) return;
    const reasons = here.names.flatMap((name, i) => [
      i ? "; " : "",
      element("span", { class: "cb-stopname", dir: "auto", text: name }),
      ...this.stopSentence(here, i, now),
    ]);
    this.stop.replaceChildren(element("b", { text: "Stopped: " }), ...reasons);
  }

  /**
   * What a breakpoint saw, where that isn't said already: by its name or by the step's sentences.
   * @param {Stop} stop
   * @param {number} i
   * @param {Why | null} now
   */
  stopSentence(stop, i, now) {
    const { text, request_ids } = stop.sentences[i];
    const said = text.startsWith(stop.names[i]) || now?.items.some((item) => item.text === text);
    return said ? [] : [": ", ...sentence(this.app, text, request_ids)];
  }

  /**
   * The event that the cursor has just passed.
   * @param {Why | null} now
   */
  drawMoment(now) {
    const { event } = this.app.run;
    this.moment.hidden = event === null;
    if (event === null) {
      this.shownMoment = null;
      return;
    }
    const moment = now?.event === event ? now.moment : null;
    if (now && moment && moment !== this.shownMoment) {
      this.shownMoment = moment;
      this.moment.replaceChildren(
        element("b", { text: `Event ${event} of ${now.num_events}: ` }),
        ...sentence(this.app, moment.text, moment.ids),
      );
    } else if (!moment && !this.shownMoment) {
      setText(this.moment, `Event ${event}`);
    }
  }

  /**
   * What was asked about: a request or a block.
   * @param {Why | null} now
   */
  drawAbout(now) {
    const { run, asked } = this.app;
    if (!asked || !run.step) {
      this.about.hidden = true;
      this.shownAbout = null;
      return;
    }
    const about = now?.about;
    if (!about || about === this.shownAbout) return;
    if (about.request !== asked.request && about.block !== asked.block) return;
    this.shownAbout = about;
    this.about.hidden = false;
    setText(this.aboutTitle, about.title);
    this.aboutList.replaceChildren(...sentenceLines(this.app, about.items));
  }
}
