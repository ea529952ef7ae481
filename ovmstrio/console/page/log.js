// Log view, with a level and a text filter.

import { change } from "./api.js";
import { act } from "./actions.js";
import { h, setText } from "./dom.js";
import * as format from "./format.js";
import { askServer, state } from "./live.js";

const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"];
let level = "INFO";
let words = "";

export function logView() {
  const list = h("div.log", { role: "log", tabindex: 0, "aria-label": "Log" });
  const counted = h("span.quiet", { role: "status" });
  const none = h("p.quiet", { role: "status", hidden: true });
  let seen = 0;
  let levels = "";
  let isPaused = false;
  const shownLevel = h("select", { "aria-label": "Minimum level", onchange() { level = shownLevel.value; view.wants = { log: level }; location.hash = "#/log/" + level; } }, LEVELS.map((each) => h("option", { value: each }, each)));
  shownLevel.value = level;
  const filter = h("input", { type: "search", "aria-label": "Words", placeholder: "Filter", value: words, oninput() { words = filter.value; all(); } });
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick() { isPaused = !isPaused; pause.setAttribute("aria-pressed", String(isPaused)); if (!isPaused) all(); } }, "Pause");
  const set = h("select", { "aria-label": "Server log level", onchange: () => act(set, () => setLevels({ level: set.value }), () => "Server log level: " + state.server.log_level) }, LEVELS.map((each) => h("option", { value: each }, each)));
  const parts = h("input.mono", {
    size: 24, spellcheck: "false", autocomplete: "off", placeholder: "ovmstrio.graphs=debug", "aria-label": "Logger levels, such as ovmstrio.graphs=debug,ovmstrio.serving.model_control=error",
    onchange: () => act(parts, () => setLevels({ log_levels: parts.value }), () => (state.server.log_levels ? "Logger levels: " + state.server.log_levels : "Logger levels reset")),
  });
  const own = h("span", { hidden: true }, h("label", {}, "server level ", set), " ", h("label", {}, "logger levels ", parts));
  const element = h("section", {}, h("div.bar", {}, h("h1", {}, "Log"), h("label", {}, "show ", shownLevel), filter, pause, own, counted), none, list);
  askServer().catch(() => {});

  async function setLevels(wanted) {
    const now = await change("/console/api/log_level", wanted);
    state.server = { ...state.server, log_level: now.level, log_levels: now.log_levels };
  }

  function reason() {
    if (state.lines.length) return "None of the " + format.plural(state.lines.length, "kept line") + " has the words “" + words.trim() + "”.";
    const server = state.server && LEVELS.indexOf(state.server.log_level) > LEVELS.indexOf(level) ? " The server writes lines from " + state.server.log_level + " on." : "";
    return "The last 500 lines of the server have none of the level " + level + " or above." + server;
  }

  function matches(line) {
    const text = (line.logger + " " + (line.worker === undefined ? "" : "worker=" + line.worker + " ") + line.event + " " + Object.entries(line.facts).map(([key, value]) => key + "=" + value).join(" ")).toLowerCase();
    return words.toLowerCase().split(/\s+/).filter(Boolean).every((word) => text.includes(word));
  }

  function lineOf(line) {
    const facts = Object.entries(line.facts).map(([key, value]) => h("span.fact-of", {}, key + "=", h("span", {}, value)));
    if (line.worker !== undefined && line.facts.worker === undefined) facts.unshift(h("span.fact-of", {}, "worker=", h("span", {}, line.worker)));
    return h("div.line." + line.level.toLowerCase(), { title: line.logger }, h("span.at", {}, format.clock(line.at)), h("span.level", {}, line.level), h("span.event", {}, line.event), " ", facts);
  }

  // Renders all kept lines; while paused, no newer ones.
  function all() {
    const until = isPaused ? seen : Infinity;
    list.replaceChildren();
    seen = 0;
    more(until);
  }

  function more(until) {
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const fresh = state.lines.filter((line) => line.number > seen && line.number <= until);
    if (fresh.length) seen = fresh.at(-1).number;
    list.append(...fresh.filter(matches).map(lineOf));
    while (list.children.length > 500) list.firstChild.remove();
    setText(counted, format.plural(list.children.length, "line"));
    none.hidden = list.children.length > 0 || state.link !== "live";
    if (!none.hidden) setText(none, reason());
    if (follows) list.scrollTop = list.scrollHeight;
  }

  const view = {
    element,
    title: "Log",
    wants: { log: level },
    update(what) {
      const last = state.lines.length ? state.lines.at(-1).number : 0;
      // A new stream starts with all kept lines; a new server restarts numbering.
      if (!isPaused && what === "rows" && last < seen) all();
      if (!isPaused && (what === "rows" || what === "log")) more(Infinity);
      if (state.server) {
        own.hidden = !state.server.may_change;
        if (document.activeElement !== set) set.value = state.server.log_level;
        if (levels !== state.server.log_levels) parts.value = levels = state.server.log_levels;
      }
    },
  };
  return view;
}
