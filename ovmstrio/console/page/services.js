// Services view: state and load of every service.

import { h, replace, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const SHOWN = 200;
const LEAST_GROWTH = 1048576;
const COLUMNS = [
  ["name", "Service", "text", (row) => row.name],
  ["kind", "Kind", "text", (row) => row.kind],
  ["state", "State", "text", (row) => row.state],
  ["rate", "Req/s", "number", (row, figures) => figures.rate || 0],
  ["error_rate", "Err/s", "number", (row, figures) => figures.error_rate || 0],
  ["p50", "p50", "number", (row, figures) => figures.p50 || 0],
  ["p99", "p99", "number", (row, figures) => figures.p99 || 0],
  ["in_flight", "In flight", "number", (row, figures) => figures.in_flight || 0],
  ["requests", "Requests", "number", (row, figures) => figures.requests || 0],
  ["errors", "Errors", "number", (row, figures) => figures.errors || 0],
  ["memory", "Memory", "number", (row, figures) => memoryOf(row, figures)[0] || 0],
];

let sorted = "name";
let descending = false;
let filter = "";

// The memory of a service and how it is known: of its processes now, or how much the server grew while loading it.
function memoryOf(row, figures) {
  if (figures.memory_bytes) return [figures.memory_bytes, "Resident memory of the service's processes"];
  const grown = row.versions.reduce((sum, each) => sum + (each.memory_bytes || 0), 0);
  if (grown >= LEAST_GROWTH) return [grown, "Growth of the server's memory while the service was loaded"];
  return [null, "In the server's process: too small to measure, or loaded together with other services"];
}

export function stateBadge(text) {
  return h("span.state." + text, {}, text);
}

export function servicesView() {
  const lines = new Map();
  // The column of the memory is left out while no service has a value.
  let hasMemory = false;
  const body = h("tbody");
  const total = h("p.quiet", { role: "status" });
  const heads = COLUMNS.map(([key, title, kind]) => h("th." + kind, { scope: "col" }, h("button", {
    onclick() {
      descending = sorted === key ? !descending : kind === "number";
      sorted = key;
      order();
    },
  }, title)));
  const field = h("input", {
    type: "search", placeholder: "Filter by name, kind or state", "aria-label": "Filter", value: filter,
    oninput(event) { filter = event.target.value; order(); },
  });
  const table = h("table.services", {}, h("thead", {}, h("tr", {}, heads)), body);
  const none = h("p.quiet", { role: "status", hidden: true });
  const scroll = h("div.scroll", {}, table);
  const element = h("section", { "aria-labelledby": "services-title" },
    h("div.bar", {}, h("h1", { id: "services-title" }, "Services"), field, total), none, scroll);

  function line(name) {
    let found = lines.get(name);
    if (!found) {
      const cells = {};
      const row = h("tr", { "data-name": name });
      for (const [key, title, kind] of COLUMNS) row.append(cells[key] = h("td." + kind, { "data-title": title }));
      cells.link = h("a", { href: "#/services/" + encodeURIComponent(name) }, name);
      cells.versions = h("span.versions");
      cells.reason = h("div.reason");
      replace(cells.name, cells.link, " ", cells.versions, cells.reason);
      cells.badge = stateBadge("");
      replace(cells.state, cells.badge);
      found = { row, cells };
      lines.set(name, found);
    }
    return found;
  }

  function fill(name) {
    const row = state.rows[name];
    const figures = state.services[name] || {};
    const { cells } = line(name);
    const serving = row.versions.filter((each) => each.state === "AVAILABLE").map((each) => "v" + each.version);
    setText(cells.versions, row.kind === "model" ? serving.join(" ") : "");
    setText(cells.reason, row.reason);
    setText(cells.kind, row.kind);
    setText(cells.badge, row.state);
    cells.badge.className = "state " + row.state;
    setText(cells.rate, format.rate(figures.rate || 0));
    setText(cells.error_rate, format.rate(figures.error_rate || 0));
    setClass(cells.error_rate, "bad", figures.error_rate > 0);
    setText(cells.p50, format.ms(figures.p50));
    setText(cells.p99, format.ms(figures.p99));
    setText(cells.in_flight, figures.in_flight || 0);
    setText(cells.requests, format.count(figures.requests || 0));
    setText(cells.errors, format.count(figures.errors || 0));
    const [memory, origin] = memoryOf(row, figures);
    setText(cells.memory, memory === null ? "" : format.bytes(memory));
    cells.memory.title = origin;
    cells.memory.hidden = !hasMemory;
  }

  function order() {
    hasMemory = Object.values(state.rows).some((row) => memoryOf(row, state.services[row.name] || {})[0] !== null);
    heads[heads.length - 1].hidden = !hasMemory;
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const names = Object.keys(state.rows).filter((name) => {
      const row = state.rows[name];
      const text = (name + " " + row.kind + " " + row.state).toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const value = COLUMNS.find(([key]) => key === sorted)[3];
    const sign = descending ? -1 : 1;
    const values = new Map(names.map((name) => [name, value(state.rows[name], state.services[name] || {})]));
    names.sort((a, b) => {
      const [left, right] = [values.get(a), values.get(b)];
      if (left < right) return -sign;
      if (left > right) return sign;
      return a < b ? -1 : 1;
    });
    heads.forEach((head, index) => {
      const isSorted = COLUMNS[index][0] === sorted;
      head.setAttribute("aria-sort", isSorted ? (descending ? "descending" : "ascending") : "none");
    });
    const visible = names.slice(0, SHOWN);
    visible.forEach(fill);
    const rows = visible.map((name) => line(name).row);
    if (rows.length !== body.children.length || rows.some((row, index) => body.children[index] !== row)) body.replaceChildren(...rows);
    const all = Object.keys(state.rows).length;
    const ready = Object.values(state.rows).filter((row) => row.state === "ready").length;
    const cut = names.length > SHOWN ? "; showing the first " + SHOWN + " of " + names.length : "";
    setText(total, all ? ready + " of " + all + " ready" + cut : state.link === "live" ? "" : "Loading");
    const reason = all ? "No service has a name, kind or state with “" + filter.trim() + "”." : "The configuration has no services. Serve a model, graph or project with: ovms serve PATH";
    none.hidden = visible.length > 0 || state.link !== "live";
    if (!none.hidden) setText(none, reason);
    scroll.hidden = !none.hidden;
    for (const name of lines.keys()) if (!state.rows[name]) lines.delete(name);
  }

  return {
    element,
    title: "Services",
    update(what) {
      if (what === "rows" || what === "figures") order();
    },
  };
}
