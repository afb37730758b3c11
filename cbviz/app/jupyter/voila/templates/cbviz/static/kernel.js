// Whether the kernel behind a page or a widget is there. Voilà's page and the widget both ask here.
// @ts-check

/** @typedef {"" | "lost" | "unreachable" | "ended"} KernelState  "": it answers; lost: trying again; unreachable: no longer trying; ended: for good. */

/**
 * Tells each change of a kernel connection. What has ended does not come back: a restarted kernel knows nothing of what was there.
 * @param {any} kernel JupyterLab's kernel connection
 * @param {(state: KernelState) => void} tell
 * @returns {() => void} stops watching
 */
export function watchKernel(kernel, tell) {
  let ended = false;
  /** @param {KernelState} state */
  const say = (state) => {
    if (ended) return;
    ended = state === "ended";
    tell(state);
  };
  const onStatus = (/** @type {any} */ _, /** @type {string} */ status) => {
    if (status === "dead" || status === "terminating" || status.endsWith("restarting")) say("ended");
  };
  const onConnection = (/** @type {any} */ _, /** @type {string} */ status) => {
    if (status === "connected") say("");
    else say(status === "disconnected" ? "unreachable" : "lost");
  };
  const onGone = () => say("ended");
  kernel.statusChanged.connect(onStatus);
  kernel.connectionStatusChanged.connect(onConnection);
  kernel.disposed.connect(onGone);
  return () => {
    kernel.statusChanged.disconnect(onStatus);
    kernel.connectionStatusChanged.disconnect(onConnection);
    kernel.disposed.disconnect(onGone);
  };
}

/**
 * The same for a widget: its kernel, and its own line to it (closed with the widget, cut at a restart). A recorded page has neither.
 * @param {any} model anywidget's model
 * @param {(state: KernelState) => void} tell
 * @returns {() => void} stops watching
 */
export function watchWidget(model, tell) {
  const kernel = model.widget_manager?.kernel;
  const stop = kernel ? watchKernel(kernel, tell) : () => {};
  const onCut = () => tell("ended");
  const cuts = ["comm_live_update", "comm:close"];
  for (const event of cuts) model.on(event, onCut);
  return () => {
    stop();
    for (const event of cuts) model.off(event, onCut);
  };
}
