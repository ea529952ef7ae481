// Activity view: charts of the server, its workers, and the last failed requests.

import { h, replace, setText } from "./dom.js";
import { chart, timeRange } from "./charts.js";
import * as format from "./format.js";
import { state } from "./live.js";
import { reloadButton } from "./actions.js";

const opened = new Set();

// The request body, if the server keeps it.
function sent(failure) {
  if (!failure.body) return null;
  const rest = failure.body_bytes > failure.body.length ? ", first part of " + format.bytes(failure.body_bytes) : "";
  const details = h("details.sent", { open: opened.has(failure.number) }, h("summary", {}, "Request body" + rest), h("pre.answer", {}, failure.body));
  details.addEventListener("toggle", () => (details.open ? opened.add(failure.number) : opened.delete(failure.number)));
  return details;
}

export function activityView() {
  const range = timeRange();
  const noCalls = "no requests in this time";
  const charts = [
    chart("Requests/s", [{ title: "", kind: "one", value: (point) => point.rate }], format.rate, range),
    chart("Latency", [
      { title: "p50", kind: "one", value: (point) => point.p50 }, { title: "p90", kind: "three", value: (point) => point.p90 }, { title: "p99", kind: "two", value: (point) => point.p99 },
    ], format.ms, range, noCalls),
    chart("Errors/s", [{ title: "", kind: "bad", value: (point) => point.error_rate }], format.rate, range),
    chart("In flight", [{ title: "", kind: "one", value: (point) => point.in_flight }], format.count, range),
    chart("Memory", [{ title: "", kind: "one", value: (point) => point.memory_bytes }], format.bytes, range),
    chart("CPU cores", [{ title: "", kind: "one", value: (point) => point.cpu }], (value) => value.toFixed(2), range),
  ];
  const body = h("tbody");
  const none = h("p.quiet", {}, "None so far.");
  const table = h("table.failures", {}, h("thead", {}, h("tr", {}, ["Time", "Service", "Error", "Node", "Call", "Duration", "Message"].map((title) => h("th", { scope: "col" }, title)))), body);
  const scroll = h("div.scroll", { hidden: true, tabindex: 0, role: "group", "aria-label": "Failed requests" }, table);
  const reload = h("span");
  const workers = h("tbody");
  const reason = h("p.quiet");
  const processes = h("div", { hidden: true }, h("h2", {}, "Workers"), reason, h("div.scroll", {}, h("table.workers", {}, h("thead", {}, h("tr", {},
    h("th", { scope: "col" }, "Worker"), ["Requests/s", "In flight", "CPU cores", "Memory", "PID"].map((title) => h("th.number", { scope: "col" }, title)))), workers)));
  const element = h("section", {}, h("div.bar", {}, h("h1", {}, "Activity"), range.element, reload),
    h("div.charts.many", {}, charts.map((each) => h("div.panel", {}, each.element))), processes, h("h2", {}, "Failed requests"), none, scroll);

  function failures() {
    none.hidden = state.failures.length > 0;
    scroll.hidden = !state.failures.length;
    replace(body, [...state.failures].reverse().map((each) => h("tr", {},
      h("td.mono", {}, format.clock(each.at)),
      h("td", {}, h("a", { href: "#/services/" + encodeURIComponent(each.name) }, each.name), each.version && each.kind === "model" ? " v" + each.version : ""),
      h("td", {}, each.code), h("td", {}, each.node || "–"),
      h("td.quiet", {}, [each.api + " " + each.interface, each.method, each.caller && "by " + each.caller, each.worker !== undefined && "worker " + each.worker, each.request_id && "id " + each.request_id].filter(Boolean).join(" · ")),
      h("td.number", {}, format.ms(each.milliseconds)), h("td.said-of", {}, each.message, sent(each)))));
  }

  // Workers, including silent ones.
  function shownWorkers() {
    const known = state.totals && state.totals.workers;
    processes.hidden = !known;
    if (!known) return;
    setText(reason, state.server && state.server.workers_reason ? "Worker count: " + state.server.workers_reason : "");
    const silent = state.totals.silent.map((worker) => h("tr.failed", {}, h("td", {}, worker), h("td.bad", { colspan: 5 }, "not responding")));
    replace(workers, [...known.map((each) => h("tr", {}, h("td", {}, each.worker), h("td.number", {}, format.rate(each.rate)), h("td.number", {}, format.count(each.in_flight)),
      h("td.number", {}, each.cpu === null ? "–" : each.cpu.toFixed(2)), h("td.number", {}, format.bytes(each.memory_bytes)), h("td.number", {}, each.pid))), ...silent]);
  }

  return {
    element,
    title: "Activity",
    wants: { failures: 1 },
    update(what) {
      if (what === "figures" || what === "rows") charts.forEach((each) => each.update(state.history.points));
      if (what === "figures" || what === "rows") shownWorkers();
      if (what === "failures" || what === "rows") failures();
      if (what === "server" || what === "rows") if (state.server && state.server.may_change && !reload.children.length) reload.append(reloadButton());
    },
  };
}
