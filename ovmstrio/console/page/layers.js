// Where a model's time goes, layer by layer, on request: the server times a copy of it for a second.

import { change } from "./api.js";
import { h, replace } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const LOOK_SECONDS = 0.05;
const SHOWN = 40;

export function layersPanel(name) {
  const result = h("div", { "aria-live": "polite" });
  const button = h("button", { type: "button", onclick: time }, "Time its layers");
  const element = h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Layers"), button), h("p.quiet", {}, "A copy of the model runs on ones for a second, which takes processors from the server."), result);

  async function time() {
    button.disabled = true;
    replace(result, h("p.quiet", {}, "Timing…"));
    try {
      const told = await change("/v2/profile", { seconds: LOOK_SECONDS, models: [name] });
      const model = told.models.find((each) => each.name === name);
      if (!model) throw new Error("the server told nothing of its layers");
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
    const whole = layers.reduce((sum, layer) => sum + layer.seconds, 0) || 1;
    const rows = layers.slice(0, SHOWN).map((layer) => h("tr", {}, h("td.layer", {}, layer.name), h("td.quiet", {}, layer.type + (layer.runs_as ? " as " + layer.runs_as : "")),
      h("td.share", {}, h("span.bar-of", { css: { width: Math.max((layer.seconds / whole) * 100, 0.5) + "%" } })), h("td.number", {}, ((layer.seconds / whole) * 100).toFixed(1) + " %"), h("td.number", {}, format.ms(layer.seconds * 1000))));
    return [h("p.quiet", {}, format.plural(layers.length, "layer") + " of version " + model.version + ", " + format.ms(model.seconds * 1000) + " an inference on average of " + model.runs + (layers.length > SHOWN ? "; the " + SHOWN + " that take most" : "")),
      h("div.scroll", {}, h("table.layers", {}, h("caption.visually-hidden", {}, "Layers, those that take most first"), h("tbody", {}, rows)))];
  }

  return { element, update() { element.hidden = !(state.server && state.server.may_change); } };
}
