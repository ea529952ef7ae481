// Admin actions: reload the configuration, load and unload services.

import { change } from "./api.js";
import { h, notice, setText } from "./dom.js";
import { state } from "./live.js";

export async function act(button, work, done) {
  button.disabled = true;
  try {
    notice(done(await work()));
  } catch (error) {
    notice(error.message, true);
  } finally {
    button.disabled = false;
  }
}

export function reloadButton() {
  const button = h("button", {
    type: "button",
    onclick: () => act(button, () => change("/console/api/reload"), (result) => (result.changed ? "Configuration reloaded" : "Configuration reloaded: no changes")),
  }, "Reload");
  return button;
}

export function serviceActions(name) {
  const path = "/console/api/services/" + encodeURIComponent(name) + "/";
  const load = h("button", { type: "button", onclick: () => act(load, () => change(path + "load"), () => name + " loaded") }, "Load");
  const unload = h("button", {
    type: "button",
    onclick() { if (confirm("Unload " + name + "? Calls to it will fail.")) act(unload, () => change(path + "unload"), () => name + " unloaded"); },
  }, "Unload");
  const element = h("span.actions", {});
  return {
    element,
    update(row) {
      const may = state.server && state.server.may_change && state.server.loads_by_name;
      if (!may) return;
      if (!element.children.length) element.append(load, unload);
      setText(load, row.state === "ready" || row.state === "degraded" ? "Reload" : "Load");
      unload.disabled = row.state !== "ready" && row.state !== "degraded";
    },
  };
}
