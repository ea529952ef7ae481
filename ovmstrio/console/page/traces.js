// Traces view: recent calls as waterfalls. Calls are recorded while this view is open.

import { get } from "./api.js";
import { h, replace, setClass } from "./dom.js";
import * as format from "./format.js";
import { state } from "./live.js";

const LEAST_PART = 0.3;

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

export function tracesView() {
  const list = h("tbody");
  const none = h("p.quiet", {}, "None yet. Calls are recorded while this view is open; at high rates only a sample.");
  const detail = h("div.panel", { hidden: true, "aria-live": "polite" });
  const rows = new Map();
  let isPaused = false;
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick() { isPaused = !isPaused; pause.setAttribute("aria-pressed", String(isPaused)); if (!isPaused) show(); } }, "Pause");
  const table = h("div.scroll", { hidden: true }, h("table.traces", {}, h("thead", {}, h("tr", {}, ["Call", "Service"].map((title) => h("th", { scope: "col" }, title)), h("th.number", { scope: "col" }, "Duration"), h("th.number", { scope: "col" }, "Spans"))), list));
  const element = h("section", {}, h("div.bar", {}, h("h1", {}, "Traces"), h("span.quiet", {}, "recorded while this view is open"), pause), none, h("div.columns.traces", {}, table, detail));

  async function open(id) {
    detail.hidden = false;
    for (const [key, row] of rows) setClass(row, "chosen", key === id);
    try {
      replace(detail, waterfall(await get("/console/api/traces/" + id)));
    } catch (error) {
      replace(detail, h("p.problem", {}, error.message));
    }
  }

  function serviceOf(trace) {
    const key = Object.keys(trace.attributes).find((name) => name.endsWith("servable.name") || name.endsWith("model.name") || name === "gen_ai.request.model" || name.endsWith("service.name"));
    return key ? trace.attributes[key] : "";
  }

  function show() {
    if (isPaused) return;
    none.hidden = state.traces.length > 0;
    table.hidden = !state.traces.length;
    const kept = new Set(state.traces.map((trace) => trace.trace_id));
    for (const id of rows.keys()) if (!kept.has(id)) rows.delete(id);
    list.replaceChildren(...state.traces.map((trace) => {
      let row = rows.get(trace.trace_id);
      if (!row) {
        row = h("tr", { class: trace.failure ? "failed" : null }, h("td", {}, h("button.span", { type: "button", onclick: () => open(trace.trace_id) }, format.clock(Number(BigInt(trace.began) / 1000000n) / 1000) + " " + trace.name), trace.failure && h("div.bad", {}, trace.failure)),
          h("td", {}, serviceOf(trace)), h("td.number", {}, format.ms(trace.milliseconds)), h("td.number", {}, trace.spans));
        rows.set(trace.trace_id, row);
      }
      return row;
    }));
  }

  return { element, title: "Traces", wants: { traces: 1 }, update(what) { if (what === "traces" || what === "rows") show(); } };
}
