// A prompt typed by the user, which joins the next step.
// @ts-check
import { element, setText } from "./dom.js";

/** @import { App } from "./page/state.js" */
/** @import { Live } from "./messages.js" */
/** @import { Run } from "./store.js" */

const BEAMS =
  "Beam search: this many of the most probable sequences go on side by side and share blocks; the best comes first in the end. Needs a real model.";
const ANSWERS =
  "Sequences from this one prompt (n): it is computed once, its blocks are shared, and each answer needs a seat. Several are drawn at temperature 0.8, so that they differ; one alone is greedy.";
const NO_BEAMS = "Beam search needs probabilities: choose a real model under Setup.";
const FIRST_BEAMS = 4;

export class PromptBox {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    /** The text that was sent, and the id that it got, until it has joined. */
    this.sent = "";
    this.joining = "";
    this.text = element("textarea", {
      class: "cb-prompt",
      dir: "auto",
      rows: 2,
      placeholder: "Type a prompt; it joins the next step",
      "aria-label": "Prompt",
      "aria-describedby": "cb-prompt-e",
      maxlength: 200000,
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey) return;
        event.preventDefault();
        this.add();
      },
    });
    this.maxTokens = element("input", {
      type: "number",
      class: "cb-maxtokens",
      min: 1,
      value: 64,
      "aria-label": "Most new tokens",
    });
    this.answers = element("input", {
      type: "number",
      class: "cb-answers",
      min: 1,
      value: 1,
      "aria-label": "Answers (n)",
      "aria-describedby": "cb-prompt-e",
      title: ANSWERS,
    });
    this.error = element("p", { class: "cb-error", id: "cb-prompt-e", role: "alert", hidden: true });
    this.said = element("p", { class: "cb-note", role: "status" });
    this.beamsOption = element("option", { value: "beams", text: "beams", title: BEAMS });
    this.way = element(
      "select",
      {
        class: "cb-answerway",
        "aria-label": "Several answers: drawn, or by beam search",
        title: ANSWERS,
        onchange: () => this.wayChanged(),
      },
      element("option", { value: "draws", text: "answers", title: ANSWERS }),
      this.beamsOption,
    );
    this.button = element("button", {
      type: "button",
      class: "cb-add",
      text: "Add",
      onclick: () => this.add(),
    });
    const asked = element(
      "div",
      { class: "cb-row cb-ask" },
      element("label", { class: "cb-inline" }, "max tokens", this.maxTokens),
      element("div", { class: "cb-inline" }, this.way, this.answers),
      this.button,
    );
    host.append(this.text, asked, this.error, this.said);
  }

  get byBeams() {
    return this.way.value === "beams";
  }

  wayChanged() {
    const title = this.byBeams ? BEAMS : ANSWERS;
    this.way.title = title;
    this.answers.title = title;
    this.answers.setAttribute("aria-label", this.byBeams ? "Beams" : "Answers (n)");
    // A beam alone is no search.
    if (this.byBeams && Number(this.answers.value) < 2) this.answers.value = String(FIRST_BEAMS);
  }

  /**
   * Beams need probabilities: where tokens are made up or repeated there is nothing to choose.
   * @param {boolean} able
   */
  allowBeams(able) {
    this.beamsOption.disabled = !able;
    this.beamsOption.title = able ? BEAMS : NO_BEAMS;
    if (able || !this.byBeams) return;
    this.way.value = "draws";
    this.wayChanged();
  }

  add() {
    this.showError("");
    if (this.maxTokens.validity.badInput) return this.showError("max tokens: this is not a number");
    if (this.answers.validity.badInput) return this.showError("answers: this is not a number");
    this.sent = this.text.value;
    this.app.send("add", { prompt: this.text.value, ...this.asked() });
  }

  /** What is asked beside the prompt; for a fork as well. */
  asked() {
    return {
      max_tokens: numberOf(this.maxTokens),
      n: numberOf(this.answers) ?? 1,
      beams: this.byBeams,
    };
  }

  /** @param {string} text empty: no error */
  showError(text) {
    setText(this.error, text);
    this.error.hidden = !text;
    if (text) setText(this.said, "");
    this.text.setAttribute("aria-invalid", String(!!text));
  }

  /** @param {string} id */
  added(id) {
    if (this.text.value === this.sent) this.text.value = "";
    setText(this.said, `${id} joins the next step`);
    this.joining = id;
  }

  /** @param {Live} live */
  showLive({ loading, open, recording, beams, max_model_len }) {
    this.button.disabled = !!loading || !open || !!recording;
    this.button.title = recording ? "This is a recording: run it again to add requests" : "";
    this.allowBeams(!!beams);
    if (max_model_len) this.maxTokens.max = String(max_model_len);
  }

  /**
   * After a picture: a request that has joined needs no announcement any more.
   * @param {Run} run
   */
  update(run) {
    if (!this.joining || !run.index.has(this.joining)) return;
    setText(this.said, "");
    this.joining = "";
  }
}

/** @param {HTMLInputElement} input */
function numberOf(input) {
  return input.value.trim() === "" ? null : Number(input.value);
}
