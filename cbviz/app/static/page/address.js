// The address of the page says which run it shows and where the cursor stands: a reload, for which Voilà starts a new kernel, comes back to it.
// @ts-check

/** @import { App } from "./state.js" */

const UPDATE_AFTER = 250;

export class Address {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.timer = 0;
  }

  /** Soon: the cursor may be moving. */
  update() {
    if (this.app.live.run === undefined || this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.write();
    }, UPDATE_AFTER);
  }

  write() {
    const address = new URL(location.href);
    const { current: run, live } = this.app;
    if (live.run) address.searchParams.set("run", live.run);
    else address.searchParams.delete("run");
    if (run && run.step < run.steps) address.searchParams.set("step", String(run.step));
    else address.searchParams.delete("step");
    if (address.href !== location.href) history.replaceState(history.state, "", address);
  }

  destroy() {
    clearTimeout(this.timer);
  }
}
