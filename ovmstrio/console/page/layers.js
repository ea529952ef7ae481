// Layer timings of a model, on request.

import { change } from "./api.js";
import { h, replace } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const LOOK_SECONDS = 0.05;
const SHOWN = 40;

export function layersPanel(name) {
  const result = h("div", { "aria-live": "polite" });
  const button = h("button", { type: "button", onclick: time }, "Time layers");
  const element = h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Layers"), button), h("p.quiet", {}, "Runs a copy of the model on constant inputs, which takes CPU time from the server."), result);

  async function time() {
    button.disabled = true;
    replace(result, h("p.quiet", {}, "Timing…"));
    try {
      const profile = await change("/v2/profile", { seconds: LOOK_SECONDS, models: [name] });
      const model = profile.models.find((each) => each.name === name);
      if (!model) throw new Error("the server returned no layer times");
      if (model.problem) throw new Error(model.problem);
      replace(result, table(model));
    } catch (error) {
      replace(result, h("p.problem", { role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  }

  function table(model) {
    const layers = [...model.layers].sort((a, b) => b.seconds - a.seconds);
    const total = layers.reduce((sum, layer) => sum + layer.seconds, 0) || 1;
    const rows = layers.slice(0, SHOWN).map((layer) => h("tr", {}, h("td.layer", {}, layer.name), h("td.quiet", {}, layer.type + (layer.runs_as ? " as " + layer.runs_as : "")),
      h("td.share", {}, h("span.bar-of", { css: { width: Math.max((layer.seconds / total) * 100, 0.5) + "%" } })), h("td.number", {}, ((layer.seconds / total) * 100).toFixed(1) + " %"), h("td.number", {}, format.ms(layer.seconds * 1000))));
    return [h("p.quiet", {}, format.plural(layers.length, "layer") + " of version " + model.version + ", " + format.ms(model.seconds * 1000) + " per inference, average of " + model.runs + (layers.length > SHOWN ? "; the slowest " + SHOWN : "")),
      h("div.scroll", {}, h("table.layers", {}, h("caption.visually-hidden", {}, "Layers, slowest first"), h("tbody", {}, rows)))];
  }

  return { element, update() { element.hidden = !(state.server && state.server.may_change); } };
}
