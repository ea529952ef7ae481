// Service view: graph with live figures, inputs and outputs, versions, facts, sequences and a test form.

import { get } from "./api.js";
import { chart, timeRange } from "./charts.js";
import { h, replace, setText } from "./dom.js";
import { between, draw, fill, nodeTable } from "./drawing.js";
import * as format from "./format.js";
import { history } from "./history.js";
import { layersPanel } from "./layers.js";
import { state } from "./live.js";
import { serviceActions } from "./actions.js";
import { stateBadge } from "./services.js";
import { tryIt } from "./tryit.js";

const NARROW = matchMedia("(max-width: 760px)");

function shown(name, value) {
  if (value && typeof value === "object" && "bytes" in value) return format.bytes(value.bytes);
  if (Array.isArray(value)) return value.length ? value.join(", ") : "none";
  if (name === "cache in use") return (value * 100).toFixed(1) + " %";
  return typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : String(value);
}

function tensors(title, list, none) {
  if (!list.length) return none ? [h("h3", {}, title), h("p.quiet", {}, none)] : null;
  return [h("h3", {}, title), h("table.plain", {}, h("tbody", {}, list.map((each) => h("tr", {}, h("th", { scope: "row" }, each.name), h("td.mono", {}, each.datatype === "INVALID" ? "any type" : each.datatype + " [" + each.shape.join(", ") + "]")))))];
}

function noInputs(given) {
  if (given.takes.includes("generation")) return "Requests are texts or sounds of the OpenAI API.";
  if (given.takes.includes("http")) return "The service reads bodies itself and declares no inputs.";
  return "The service declares no inputs.";
}

function noForm(given) {
  if (given.tasks && given.tasks.length) return "There is no form for the tasks of this model: " + given.tasks.join(", ") + ".";
  return "There is no form: the service takes no tensors, HTTP requests or chats, but " + (given.takes.join(", ") || "nothing") + ".";
}

export function serviceView([name]) {
  const path = "/console/api/services/" + encodeURIComponent(name);
  const head = h("div.bar");
  const reason = h("p.reason");
  const body = h("div.service");
  const facts = h("dl.facts-list");
  const sequences = h("div");
  const past = history();
  const range = timeRange();
  let document_ = null;
  let drawn = null;
  let table = null;
  let before = null;
  let loads = "";
  let trial = null;
  let layers = null;
  const charts = [
    chart("Requests/s", [{ key: "rate", title: "", kind: "one", value: (point) => point.rate }, { key: "error_rate", title: "failed", kind: "bad", value: (point) => point.error_rate }], format.rate, range),
    chart("Latency", [{ key: "p50", title: "p50", kind: "one", value: (point) => point.p50 }, { key: "p99", title: "p99", kind: "two", value: (point) => point.p99 }], format.ms, range, "no requests in this time"),
  ];
  const title = h("h1", {}, name);
  const badge = stateBadge("");
  const element = h("section", {}, h("p.crumbs", {}, h("a", { href: "#/services" }, "Services"), " / "), head, reason, body);
  const actions = serviceActions(name);
  replace(head, title, badge, h("span.quiet", { id: "kind" }), actions.element);
  const picture = h("div.canvas", { tabindex: 0, role: "group", "aria-label": "Graph, scrollable" });

  function showDrawing() {
    drawn = draw(document_.drawing, NARROW.matches, name);
    replace(picture, drawn.picture);
    // A wide graph begins with its first box in the middle.
    const first = drawn.picture.querySelector("g.box");
    if (first && NARROW.matches) picture.scrollLeft = first.getBoundingClientRect().left - picture.getBoundingClientRect().left - picture.clientWidth / 3;
    figures(document_);
  }

  function figures(now) {
    if (!drawn) return;
    const made = between(before, now);
    fill(drawn, made);
    table.fill(made);
  }

  function showFacts(given) {
    const known = Object.entries(given.facts || {});
    const made = state.nodes && before && before.facts ? given.facts["tokens made"] - before.facts["tokens made"] : null;
    const rates = made !== null && !Number.isNaN(made) && given.at > before.at ? [["tokens/s", format.rate(made / ((given.at - before.at) / 1000))]] : [];
    replace(facts, [...known, ...rates].map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, shown(key, value)))));
    facts.hidden = !known.length;
  }

  function showSequences(given) {
    if (!given.sequences) { replace(sequences); return; }
    const rows = given.sequences.map((each) => h("tr", {}, h("td.mono", {}, each.id), h("td.number", {}, format.seconds(each.age_seconds)), h("td.number", {}, format.seconds(each.idle_seconds)), h("td.number", {}, each.requests)));
    const cut = given.sequence_count > rows.length ? " (the first " + rows.length + ")" : "";
    replace(sequences, h("h2", {}, format.plural(given.sequence_count, "live sequence") + cut),
      rows.length ? h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Id"), ["Age", "Idle", "Requests"].map((text) => h("th.number", { scope: "col" }, text)))), h("tbody", {}, rows))) : h("p.quiet", {}, "None is open: a sequence lives from its first request, with sequence_start, to its last, with sequence_end, or until it times out."));
  }

  function versions(row) {
    return h("table.plain", {}, h("tbody", {}, row.versions.map((each) => h("tr", {}, h("th", { scope: "row" }, "version " + each.version), h("td", {}, each.state.toLowerCase()),
      h("td.quiet", {}, [each.load_seconds !== null && "loaded in " + format.seconds(each.load_seconds), each.memory_bytes !== null && format.bytes(each.memory_bytes)].filter(Boolean).join(", ")), h("td.reason", {}, each.reason)))));
  }

  async function load() {
    try {
      document_ = await get(path);
    } catch (error) {
      replace(body, h("p.problem", {}, error.message));
      return;
    }
    get(path + "/series").then((series) => past.merge(series), () => {});
    before = null;
    drawn = null;
    if (trial) trial.close();
    trial = document_.problem ? null : tryIt(document_);
    table = document_.drawing ? nodeTable(document_.drawing) : null;
    layers = document_.kind === "model" && !document_.problem ? layersPanel(name) : null;
    const about = h("div.panel", { "aria-label": "Details" }, h("h2", {}, "Details"), facts, tensors("Inputs", document_.inputs || [], document_.problem ? "" : noInputs(document_)), tensors("Outputs", document_.outputs || []), h("h3", {}, "Versions"), h("div", { id: "versions" }, versions(document_)));
    replace(body,
      document_.problem && h("p.problem", {}, document_.problem),
      document_.drawing && h("div.panel.wide", {}, h("h2", {}, "Graph"), picture, table.element),
      h("div.columns", {},
        h("div", {}, h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Load"), range.element), h("div.charts", {}, charts.map((each) => each.element))), about, layers && layers.element, h("div.panel.sequences", { hidden: !document_.sequences }, sequences)),
        document_.problem ? null : h("div.panel", {}, h("h2", {}, "Try it"), trial ? trial.element : h("p.quiet", {}, noForm(document_)))));
    showFacts(document_);
    showSequences(document_);
    if (document_.drawing) showDrawing();
    showRow();
  }

  function showRow() {
    const row = state.rows[name] || document_;
    if (!row) return;
    setText(badge, row.state);
    badge.className = "state " + row.state;
    setText(reason, row.reason);
    setText(head.querySelector("#kind"), row.kind);
    actions.update(row);
    if (layers) layers.update();
    const list = body.querySelector("#versions");
    if (list) replace(list, versions(row));
  }

  const turned = () => { if (document_ && document_.drawing) showDrawing(); };
  NARROW.addEventListener("change", turned);

  return {
    element,
    title: name,
    wants: { service: name },
    update(what) {
      if (what === "rows") {
        showRow();
        const row = state.rows[name];
        // A reloaded service may have other inputs and nodes.
        const mark = row ? JSON.stringify(row.versions) : "";
        if (row && mark !== loads) { loads = mark; load(); }
        else if (!row && state.link === "live" && loads === "") { loads = "-"; load(); }
      }
      if (what === "figures") {
        const at = state.totals ? state.totals.at : 0;
        if (!past.points.length || past.points.at(-1).at < at) past.add({ rate: 0, error_rate: 0, p50: null, p99: null, ...state.services[name], at });
        charts.forEach((each) => each.update(past.points));
      }
      if (what === "nodes" && state.nodes && state.nodes.service === name && document_ && !state.nodes.problem) {
        figures(state.nodes);
        showFacts(state.nodes);
        showSequences(state.nodes);
        before = state.nodes;
      }
    },
    close() {
      NARROW.removeEventListener("change", turned);
      if (trial) trial.close();
    },
  };
}
