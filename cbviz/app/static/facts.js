// Facts in two columns: what it is, and its value.
// @ts-check
import { element, setText, sync } from "./dom.js";

/**
 * `help` is its tooltip; `data` an attribute that names it: [name, value].
 * @typedef {{ name: string, value: string, help?: string, data?: [string, string] }} Fact
 */

export class FactRow {
  /** @param {Fact} fact */
  constructor(fact) {
    this.value = element("dd");
    const data = fact.data ? { [fact.data[0]]: fact.data[1] } : {};
    this.node = element(
      "div",
      { title: fact.help ?? null, ...data },
      element("dt", { text: fact.name }),
      this.value,
    );
  }
}

/**
 * @param {HTMLDListElement} list
 * @param {Fact[]} facts
 */
export function showFacts(list, facts) {
  sync(list, facts, {
    key: (fact) => fact.name,
    make: (fact) => new FactRow(fact),
    update: (row, fact) => setText(row.value, fact.value),
  });
}
