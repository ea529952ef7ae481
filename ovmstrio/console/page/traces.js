// Traces view: recent calls as waterfalls. Calls are recorded while this view is open.

import { get } from "./api.js";
import { h, replace, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const LEAST_PART = 0.3;
const SHOWN = 200;

// Spans in tree order with their depth; a span whose parent is unknown is a root.
export function ordered(spans) {
  const children = new Map();
  const known = new Set(spans.map((span) => span.span_id));
  const sorted = [...spans].sort((a, b) => (BigInt(a.began) < BigInt(b.began) ? -1 : 1));
  for (const span of sorted) {
    const parent = known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(span);
  }
  const rows = [];
  const seen = new Set();
  const add = (parent, depth) => {
    for (const span of children.get(parent) || []) {
      if (seen.has(span.span_id)) continue;
      seen.add(span.span_id);
      rows.push({ span, depth });
      add(span.span_id, depth + 1);
    }
  };
  add("", 0);
  return rows;
}

function took(span) {
  return Number(BigInt(span.ended) - BigInt(span.began)) / 1e6;
}

function waterfall(trace) {
  const rows = ordered(trace.tree);
  const begin = rows.reduce((least, { span }) => (BigInt(span.began) < least ? BigInt(span.began) : least), BigInt(rows[0].span.began));
  const end = rows.reduce((most, { span }) => (BigInt(span.ended) > most ? BigInt(span.ended) : most), begin);
  const total = Math.max(Number(end - begin), 1);
  const about = h("dl.facts-list");
  const body = h("tbody", {}, rows.map(({ span, depth }) => {
    const left = (Number(BigInt(span.began) - begin) / total) * 100;
    const width = Math.max((Number(BigInt(span.ended) - BigInt(span.began)) / total) * 100, LEAST_PART);
    const tell = () => {
      const facts = [...Object.entries(span.attributes), ...(span.failure ? [["failure", span.failure]] : []), ...span.events.map((event) => ["event", event.name])];
      replace(about, [["span", span.name], ["kind", span.kind], ["duration", format.ms(took(span))], ...facts].map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, String(value)))));
    };
    return h("tr", {}, h("td", {}, h("button.span", { type: "button", css: { "padding-left": depth * 1.1 + "rem" }, onclick: tell, onfocus: tell }, span.name)),
      h("td.lane", {}, h("span.part" + (span.failure ? ".failed" : "." + span.kind), { css: { "margin-left": Math.min(left, 100 - LEAST_PART) + "%", width: Math.min(width, 100 - Math.min(left, 100 - LEAST_PART)) + "%" } })),
      h("td.number", {}, format.ms(took(span))));
  }));
  return [h("p.quiet.mono", {}, trace.trace_id), h("table.waterfall", {}, h("caption.visually-hidden", {}, "Spans of the call, in order"), body),
    trace.dropped ? h("p.quiet", {}, trace.dropped + " more spans were dropped.") : null, about];
}

function serviceOf(trace) {
  const key = Object.keys(trace.attributes).find((name) => name.endsWith("servable.name") || name.endsWith("model.name") || name === "gen_ai.request.model" || name.endsWith("service.name"));
  return key ? String(trace.attributes[key]) : "";
}

// The filter stays when the view is left.
const filter = { service: "", least: 0 };

export function tracesView() {
  const opened = Date.now() / 1000;
  const list = h("tbody");
  const none = h("p.quiet", { role: "status" });
  const counted = h("span.quiet");
  const detail = h("div.panel", { hidden: true, "aria-live": "polite" });
  const rows = new Map();
  let isPaused = false;
  let chosen = "";
  const service = h("select", { "aria-label": "Service", onchange() { filter.service = service.value; show(true); } });
  const least = h("input", { type: "number", min: 0, step: "any", value: filter.least || "", placeholder: "0", "aria-label": "Minimum duration in milliseconds", oninput() { filter.least = Math.max(Number(least.value) || 0, 0); show(true); } });
  const reset = h("button.small", { type: "button", onclick() { filter.service = ""; filter.least = 0; least.value = ""; show(true); } }, "Show all");
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick() { isPaused = !isPaused; pause.setAttribute("aria-pressed", String(isPaused)); if (!isPaused) show(); } }, "Pause");
  const table = h("div.scroll.recent", { hidden: true, tabindex: 0, role: "group", "aria-label": "Recorded calls, newest first" }, h("table.traces", {}, h("thead", {}, h("tr", {}, ["Call", "Service"].map((title) => h("th", { scope: "col" }, title)), h("th.number", { scope: "col" }, "Duration"), h("th.number", { scope: "col" }, "Spans"))), list));
  const element = h("section", {}, h("div.bar", {}, h("h1", {}, "Traces"), h("label", {}, "service ", service), h("label", {}, "at least ", least, " ms"), reset, pause, counted), none, h("div.columns.traces", {}, table, detail));

  async function open(id) {
    chosen = id;
    detail.hidden = false;
    for (const [key, { row }] of rows) setClass(row, "chosen", key === id);
    try {
      replace(detail, waterfall(await get("/console/api/traces/" + id)));
    } catch (error) {
      replace(detail, h("p.problem", {}, error.message));
    }
  }

  function rowOf(trace) {
    const known = rows.get(trace.trace_id);
    if (known && known.spans === trace.spans) return known.row;
    const row = h("tr", { class: trace.failure ? "failed" : null }, h("td", {}, h("button.span", { type: "button", onclick: () => open(trace.trace_id) }, format.clock(Number(BigInt(trace.began) / 1000000n) / 1000) + " " + trace.name), trace.failure && h("div.bad", {}, trace.failure)),
      h("td", {}, serviceOf(trace)), h("td.number", {}, format.ms(trace.milliseconds)), h("td.number", {}, trace.spans));
    setClass(row, "chosen", trace.trace_id === chosen);
    rows.set(trace.trace_id, { row, spans: trace.spans });
    return row;
  }

  function reason(all) {
    if (!all) return "No call has ended since this view was opened at " + format.clock(opened) + ". Calls are recorded while it is open; at high rates only a sample.";
    const parts = [filter.service && "of the service " + filter.service, filter.least && "of at least " + filter.least + " ms"].filter(Boolean);
    return "None of the " + format.plural(all, "recorded call") + " is one " + parts.join(" ") + ".";
  }

  function show(isForced) {
    if (isPaused && !isForced) return;
    const all = state.traces;
    const names = [...new Set([filter.service, ...all.map(serviceOf)])].filter(Boolean).sort();
    if (service.dataset.names !== JSON.stringify(names)) {
      service.dataset.names = JSON.stringify(names);
      replace(service, h("option", { value: "" }, "all"), names.map((name) => h("option", { value: name }, name)));
    }
    service.value = filter.service;
    const found = all.filter((trace) => (!filter.service || serviceOf(trace) === filter.service) && trace.milliseconds >= filter.least);
    none.hidden = found.length > 0;
    setText(none, found.length ? "" : reason(all.length));
    table.hidden = !found.length;
    reset.hidden = !filter.service && !filter.least;
    setText(counted, all.length ? found.length + " of " + format.plural(all.length, "recorded call") : "");
    const kept = new Set(all.map((trace) => trace.trace_id));
    for (const id of rows.keys()) if (!kept.has(id)) rows.delete(id);
    // The list stays at the newest call, or at the calls that the reader scrolled to.
    const [isAtNewest, before] = [table.scrollTop < 4, table.scrollHeight - table.scrollTop];
    const focused = document.activeElement;
    const wanted = found.slice(0, SHOWN).map(rowOf);
    if (wanted.length !== list.children.length || wanted.some((row, index) => row !== list.children[index])) list.replaceChildren(...wanted);
    if (list.contains(focused)) focused.focus({ preventScroll: true });
    if (!isAtNewest) table.scrollTop = table.scrollHeight - before;
  }

  return { element, title: "Traces", wants: { traces: 1 }, update(what) { if (what === "traces" || what === "rows") show(); } };
}
