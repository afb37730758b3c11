// What a class needs: a layout with large type for the projector, and, where the server allows it, a box in which a policy is typed.
import { h, setText } from "./dom.js";
const LARGE = 1.45; // explorer.css has the same figure for words (--cb-large); this one is for the axes
// The layout stands in the address (?layout=presenter), so that a link brings it. `again(scale)` redraws with type of that size.
export class Presenter {
  constructor(root, again, keep) {
    Object.assign(this, { root, again, keep });
    this.on = false;
    this.button = h("button", {
      type: "button",
      class: "cb-btn cb-present",
      text: "Present",
      title: "Large type for a projector (P)",
      "aria-pressed": "false",
      onclick: () => this.set(!this.on),
    });
  }
  begin() {
    if (this.keep && new URLSearchParams(location.search).get("layout") === "presenter") this.set(true);
  }
  get scale() {
    return this.on ? LARGE : 1;
  }
  set(on) {
    this.on = on;
    this.root.classList.toggle("cb-presenter", on);
    this.button.setAttribute("aria-pressed", String(on));
    this.again(this.scale);
    if (!this.keep) return;
    const u = new URL(location.href);
    if (on) u.searchParams.set("layout", "presenter");
    else u.searchParams.delete("layout");
    if (u.href !== location.href) history.replaceState(history.state, "", u);
  }
}
export class PolicyBox {
  constructor(host, app) {
    this.app = app;
    this.text = h("textarea", {
      class: "cb-code",
      rows: 7,
      spellcheck: "false",
      autocapitalize: "off",
      "aria-label": "Python code of a policy",
      "aria-describedby": "cb-policy-e",
      maxlength: 20000,
    });
    this.text.value =
      '@cb.policy\ndef shortest_prompt(r, now):\n    """Fewest prompt tokens first."""\n    return r.num_prompt_tokens\n';
    this.error = h("p", { class: "cb-error", id: "cb-policy-e", role: "alert", hidden: true });
    this.said = h("p", { class: "cb-note", role: "status" });
    this.button = h("button", {
      type: "button",
      class: "cb-add cb-runpolicy",
      text: "Apply",
      onclick: () => this.apply(),
    });
    host.append(this.text, h("div", { class: "cb-row" }, this.button), this.error, this.said);
  }
  apply() {
    this.answer({});
    this.app.send("policy", { source: this.text.value });
  }
  answer(m) {
    setText(this.error, m.error || "");
    this.error.hidden = !m.error;
    this.text.setAttribute("aria-invalid", String(!!m.error));
    setText(this.said, m.policy ? `${m.policy} ranks from the next step on` : "");
  }
}
