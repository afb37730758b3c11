// The page's line to its kernel: what is sent, and which picture is acknowledged.
// @ts-check

/** @import { KernelModel, ToKernel } from "../messages.js" */

export class KernelLine {
  /** @param {KernelModel} model */
  constructor(model) {
    this.model = model;
    /** False: the kernel has ended or can't be reached; nothing is sent. */
    this.reachable = true;
    /** The last picture, and whether the kernel still waits to hear of it. */
    this.lastPicture = 0;
    this.acknowledgeDue = false;
  }

  /** @param {ToKernel} message */
  post(message) {
    if (this.reachable) this.model.send(message);
  }

  /**
   * A command of the user.
   * @param {string} cmd
   * @param {Record<string, unknown>} [more]
   */
  send(cmd, more = {}) {
    this.post({ type: "cmd", cmd, ...more });
  }

  /** @param {number} number of the picture */
  received(number) {
    this.lastPicture = number;
    this.acknowledgeDue = true;
  }

  /** Tells the kernel that the last picture has been taken up: it may send the next one. */
  acknowledge() {
    if (!this.acknowledgeDue) return;
    this.acknowledgeDue = false;
    this.post({ type: "ack", seq: this.lastPicture });
  }
}
