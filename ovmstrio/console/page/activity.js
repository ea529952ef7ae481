// Activity view: charts of the server, its workers, and the last failed requests.

import { h, replace, setText } from "./dom.js";
import { chart, timeRange } from "./charts.js";
import * as format from "./format.js";
import { state } from "./live.js";
import { reloadButton } from "./actions.js";

// Groups and bodies that the reader opened.
const opened = new Set();
const keyOf = (each) => JSON.stringify([each.name, each.code, each.node]);

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
  const none = h("p.quiet", {}, "No request has failed since the server started. Requests that their clients cancelled do not count.");
  const table = h("table.failures", {}, h("thead", {}, h("tr", {}, ["Service", "Error", "Node"].map((title) => h("th", { scope: "col" }, title)), ["Count", "Last"].map((title) => h("th.number", { scope: "col" }, title)), h("th", { scope: "col" }, "Last message"))), body);
  const scroll = h("div.scroll", { hidden: true, tabindex: 0, role: "group", "aria-label": "Failed requests" }, table);
  const reload = h("span");
  const workers = h("tbody");
  const reason = h("p.quiet");
  const processes = h("div", { hidden: true }, h("h2", {}, "Workers"), reason, h("div.scroll", {}, h("table.workers", {}, h("thead", {}, h("tr", {},
    h("th", { scope: "col" }, "Worker"), ["Requests/s", "In flight", "CPU cores", "Memory", "PID"].map((title) => h("th.number", { scope: "col" }, title)))), workers)));
  const element = h("section", {}, h("div.bar", {}, h("h1", {}, "Activity"), range.element, reload),
    h("div.charts.many", {}, charts.map((each) => h("div.panel", {}, each.element))), processes, h("h2", {}, "Failed requests"), none, scroll);

  function call(each) {
    const about = [each.api + " " + each.interface, each.method, each.version && each.kind === "model" && "version " + each.version, each.caller && "by " + each.caller, each.worker !== undefined && "worker " + each.worker, each.request_id && "id " + each.request_id];
    return h("li", {}, h("span.mono", {}, format.clock(each.at)), " ", h("span.quiet", {}, [...about, format.ms(each.milliseconds)].filter(Boolean).join(" · ")), h("div.message", {}, each.message), sent(each));
  }

  function rowsOf(group, index) {
    const key = keyOf(group);
    const isOpen = opened.has(key);
    const id = "calls-" + index;
    const open = h("button.span", {
      type: "button", "aria-expanded": String(isOpen), "aria-controls": isOpen ? id : null, "data-key": key,
      onclick() { if (!opened.delete(key)) opened.add(key); failures(); },
    }, (isOpen ? "▾ " : "▸ ") + group.code);
    const row = h("tr", {}, h("td", {}, h("a", { href: "#/services/" + encodeURIComponent(group.name) }, group.name)), h("td", {}, open), h("td", {}, group.node || "–"),
      h("td.number", {}, format.count(group.count)), h("td.number", { title: "first " + format.clock(group.first) }, format.clock(group.last)), h("td.message", {}, group.message));
    if (!isOpen) return row;
    const calls = state.failures.filter((each) => keyOf(each) === key).reverse();
    const older = group.count > calls.length ? h("p.quiet", {}, "Only the last 100 failed requests of the server are kept; " + format.count(group.count - calls.length) + " of this group are not.") : null;
    return [row, h("tr.calls", { id }, h("td", { colspan: 6 }, calls.length ? h("ul", {}, calls.map(call)) : null, older))];
  }

  function failures() {
    none.hidden = state.groups.length > 0;
    scroll.hidden = !state.groups.length;
    // The rows are replaced, but the focus and a selection of text must survive.
    if (body.contains(getSelection().anchorNode) && !getSelection().isCollapsed) return;
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    replace(body, state.groups.map(rowsOf));
    if (focused) [...body.querySelectorAll("button")].find((each) => each.dataset.key === focused)?.focus();
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
