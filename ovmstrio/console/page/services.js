// Services view: state and load of every service.

import { h, replace, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const SHOWN = 200;
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
  ["memory", "Memory", "number", (row) => memoryOf(row) || 0],
];

let sorted = "name";
let descending = false;
let filter = "";

export function memoryOf(row) {
  const known = row.versions.map((each) => each.memory_bytes).filter((size) => size !== null);
  return known.length ? known.reduce((sum, size) => sum + size, 0) : null;
}

export function stateBadge(text) {
  return h("span.state." + text, {}, text);
}

export function servicesView() {
  const lines = new Map();
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
  const element = h("section", { "aria-labelledby": "services-title" },
    h("div.bar", {}, h("h1", { id: "services-title" }, "Services"), field, total), h("div.scroll", {}, table));

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
    setText(cells.memory, format.bytes(memoryOf(row)));
  }

  function order() {
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
    setText(total, all ? ready + " of " + all + " ready" + cut : state.link === "live" ? "No services configured." : "Loading");
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
