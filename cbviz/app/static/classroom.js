// What a class needs: a layout with large type for the projector, and, where the server allows it, a box in which a policy is typed.
// @ts-check
import { element, setText } from "./dom.js";

/** @import { App } from "./page/state.js" */
/** @import { Said } from "./messages.js" */

/** Size of type on the axes; explorer.css has the same figure for words (--cb-large). */
const LARGE = 1.45;
const EXAMPLE =
  '@cb.policy\ndef shortest_prompt(r, now):\n    """Fewest prompt tokens first."""\n    return r.num_prompt_tokens\n';

/** Large type, on and off. */
export class Presenter {
  /**
   * @param {HTMLElement} root
   * @param {() => void} redraw with type of the new size
   * @param {boolean} inAddress the layout stands in the address (?layout=presenter), so that a link brings it
   */
  constructor(root, redraw, inAddress) {
    this.root = root;
    this.redraw = redraw;
    this.inAddress = inAddress;
    this.on = false;
    this.button = element("button", {
      type: "button",
      class: "cb-btn cb-present",
      text: "Present",
      title: "Large type for a projector (P)",
      "aria-pressed": "false",
      onclick: () => this.set(!this.on),
    });
  }

  /** As the address says. */
  begin() {
    const layout = new URLSearchParams(location.search).get("layout");
    if (this.inAddress && layout === "presenter") this.set(true);
  }

  get scale() {
    return this.on ? LARGE : 1;
  }

  /** @param {boolean} on */
  set(on) {
    this.on = on;
    this.root.classList.toggle("cb-presenter", on);
    this.button.setAttribute("aria-pressed", String(on));
    this.redraw();
    if (!this.inAddress) return;
    const address = new URL(location.href);
    if (on) address.searchParams.set("layout", "presenter");
    else address.searchParams.delete("layout");
    if (address.href !== location.href) history.replaceState(history.state, "", address);
  }
}

export class PolicyBox {
  /**
   * @param {HTMLElement} host
   * @param {App} app
   */
  constructor(host, app) {
    this.app = app;
    this.text = element("textarea", {
      class: "cb-code",
      rows: 7,
      spellcheck: "false",
      autocapitalize: "off",
      "aria-label": "Python code of a policy",
      "aria-describedby": "cb-policy-e",
      maxlength: 20000,
    });
    this.text.value = EXAMPLE;
    this.error = element("p", { class: "cb-error", id: "cb-policy-e", role: "alert", hidden: true });
    this.said = element("p", { class: "cb-note", role: "status" });
    this.button = element("button", {
      type: "button",
      class: "cb-add cb-runpolicy",
      text: "Apply",
      onclick: () => this.apply(),
    });
    host.append(this.text, element("div", { class: "cb-row" }, this.button), this.error, this.said);
  }

  apply() {
    this.answer({});
    this.app.send("policy", { source: this.text.value });
  }

  /** @param {Pick<Said, "error" | "policy">} answer */
  answer({ error, policy }) {
    setText(this.error, error || "");
    this.error.hidden = !error;
    this.text.setAttribute("aria-invalid", String(!!error));
    setText(this.said, policy ? `${policy} ranks from the next step on` : "");
  }
}
