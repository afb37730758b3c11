// A kernel that has ended is told once and for good; a connection that is lost may come back.
import { test } from "node:test";
import assert from "node:assert/strict";
import { watchKernel, watchWidget } from "../../cbviz/app/jupyter/voila/templates/cbviz/static/kernel.js";

class Signal {
  constructor() {
    this.slots = new Set();
  }
  connect(f) {
    this.slots.add(f);
  }
  disconnect(f) {
    this.slots.delete(f);
  }
  emit(value) {
    for (const f of [...this.slots]) f(this, value);
  }
}

const aKernel = () => ({
  statusChanged: new Signal(),
  connectionStatusChanged: new Signal(),
  disposed: new Signal(),
});

function aModel(kernel) {
  const slots = new Map();
  return {
    widget_manager: kernel ? { kernel } : undefined,
    on: (event, f) => slots.set(event, f),
    off: (event) => slots.delete(event),
    emit: (event) => slots.get(event)?.(),
    slots,
  };
}

for (const status of ["restarting", "autorestarting", "dead", "terminating"]) {
  test(`${status} is the end, also when the connection is there again`, () => {
    const told = [];
    const kernel = aKernel();
    watchKernel(kernel, (state) => told.push(state));
    kernel.statusChanged.emit("busy");
    kernel.statusChanged.emit(status);
    kernel.connectionStatusChanged.emit("connected");
    kernel.statusChanged.emit("idle");
    assert.deepEqual(told, ["ended"]);
  });
}

test("a connection is lost, found, given up and found again", () => {
  const told = [];
  const kernel = aKernel();
  watchKernel(kernel, (state) => told.push(state));
  for (const status of ["connecting", "connected", "disconnected", "connected"]) {
    kernel.connectionStatusChanged.emit(status);
  }
  assert.deepEqual(told, ["lost", "", "unreachable", ""]);
});

test("another kernel in its place is the end of this one", () => {
  const told = [];
  const kernel = aKernel();
  watchKernel(kernel, (state) => told.push(state));
  kernel.disposed.emit();
  assert.deepEqual(told, ["ended"]);
});

for (const event of ["comm_live_update", "comm:close"]) {
  test(`a widget hears ${event} and forgets everything when it goes`, () => {
    const told = [];
    const kernel = aKernel();
    const model = aModel(kernel);
    const stop = watchWidget(model, (state) => told.push(state));
    model.emit(event);
    assert.deepEqual(told, ["ended"]);
    stop();
    assert.equal(model.slots.size, 0);
    assert.equal(
      kernel.statusChanged.slots.size +
        kernel.connectionStatusChanged.slots.size +
        kernel.disposed.slots.size,
      0,
    );
  });
}

test("a recorded page has no kernel to watch", () => {
  const model = aModel(null);
  watchWidget(model, () => assert.fail("nothing to tell"))();
  assert.equal(model.slots.size, 0);
});
