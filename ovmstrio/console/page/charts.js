// Charts over time of the last hour, with the value under the pointer, and zoom that all charts of a view share.

import { h, s, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { after } from "./history.js";
import { state } from "./live.js";

const WIDTH = 320;
const HEIGHT = 88;
const BUCKETS = 160;
const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
// A longer time between two points is a gap: the server keeps a point for every five seconds.
const GAP_SECONDS = 11;
const LEAST_SECONDS = 60;
const LEAST_ZOOM_SECONDS = 5;

// The next round number: 1, 2 or 5 times a power of ten, of a unit of bytes too.
function niceTop(value, isBytes) {
  if (!(value > 0)) return 1;
  const unit = isBytes ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(value / unit)) * unit;
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// The shown time of a view's charts: the last seconds, or a fixed part; and the time under the pointer.
export function timeRange() {
  const listeners = [];
  const range = { span: 900, part: null, first: 0, cursor: null, listeners, show, zoom };
  const buttons = SPANS.map(([span, text]) => h("button.small", { type: "button", onclick: () => { range.span = span; zoom(null); } }, text));
  const part = h("span.quiet.mono");
  const back = h("button.small", { type: "button", onclick: () => zoom(null) }, "Follow");
  range.element = h("span.bar.range", {}, h("span.segments", { role: "group", "aria-label": "Shown time" }, buttons), part, back);

  function show() {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(!range.part && SPANS[index][0] === range.span)));
    back.hidden = !range.part;
    setText(part, range.part ? format.clock(range.part[0]) + " – " + format.clock(range.part[1]) : "");
    for (const listener of listeners) listener();
  }

  function zoom(wanted) {
    range.part = wanted && wanted[1] - wanted[0] >= LEAST_ZOOM_SECONDS ? wanted : null;
    range.cursor = null;
    show();
  }

  // A younger server fills the charts, too: they cover one minute at least.
  range.limits = () => range.part || [Math.max(now() - range.span, Math.min(range.first, now() - LEAST_SECONDS)), now()];
  show();
  return range;
}

function now() {
  return state.totals ? state.totals.at : Date.now() / 1000;
}

// series: [{ title, kind, value(point) }]; show: formats a value; empty: the reason for a chart without values.
export function chart(title, series, show, range, empty) {
  const lines = series.map((each) => s("path.line." + each.kind, {}));
  const grid = [0.5, 1].map((part) => s("line.grid", { x1: 0, x2: WIDTH, y1: HEIGHT * (1 - part) + 0.5, y2: HEIGHT * (1 - part) + 0.5 }));
  const pointer = s("line.pointer", { y1: 0, y2: HEIGHT, visibility: "hidden" });
  const chosen = s("rect.chosen", { y: 0, height: HEIGHT, visibility: "hidden" });
  const picture = s("svg.chart", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none", "aria-hidden": "true" }, grid, chosen, lines, pointer);
  const scale = h("span.scale");
  const from = h("span");
  const until = h("span");
  const none = h("span.none");
  const values = series.map((each) => h("b", {}, "–"));
  const plot = h("div.plot", {
    tabindex: 0, role: "slider", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "",
    title: "Move to read values, drag to zoom, double-click to follow",
    onpointermove: (event) => point(event), onpointerleave: () => { if (dragged === null) range.cursor = null; range.show(); },
    onpointerdown: (event) => { if (event.pointerType !== "touch" && event.button === 0) { dragged = timeAt(event); plot.setPointerCapture(event.pointerId); } else point(event); },
    onpointerup: (event) => {
      if (dragged === null) return;
      const ends = [dragged, timeAt(event)].sort((a, b) => a - b);
      dragged = null;
      if (ends[1] - ends[0] > (range.limits()[1] - range.limits()[0]) / 50) range.zoom(ends);
      else draw();
    },
    ondblclick: () => range.zoom(null),
    onkeydown: key,
    onblur: () => { range.cursor = null; range.show(); },
  }, picture, scale, none);
  const element = h("figure.chart", {},
    h("figcaption", {}, h("span.name", {}, title), series.map((each, index) => h("span.key." + each.kind, {}, each.title ? each.title + " " : "", values[index]))),
    plot, h("div.times", { "aria-hidden": "true" }, from, until));
  let points = [];
  let dragged = null;

  function timeAt(event) {
    const frame = plot.getBoundingClientRect();
    const [begin, end] = range.limits();
    return begin + Math.min(Math.max((event.clientX - frame.left) / frame.width, 0), 1) * (end - begin);
  }

  function point(event) {
    range.cursor = timeAt(event);
    range.show();
  }

  function key(event) {
    const [begin, end] = range.limits();
    const step = Math.max((end - begin) / 60, 1);
    const at = range.cursor === null ? end : range.cursor;
    const moved = { ArrowLeft: at - step, ArrowRight: at + step, Home: begin, End: end }[event.key];
    const middle = (part) => [Math.max(at - (end - begin) * part, now() - 3600), Math.min(at + (end - begin) * part, now())];
    if (moved !== undefined) range.cursor = Math.min(Math.max(moved, begin), end);
    else if (event.key === "+") range.zoom(middle(0.25));
    else if (event.key === "-" || event.key === "Escape") range.zoom(null);
    else return;
    event.preventDefault();
    range.show();
  }

  // The point that is shown under the pointer; none in a gap.
  function pointAt(time) {
    const index = after(points, time);
    const near = [points[index - 1], points[index]].filter(Boolean).sort((a, b) => Math.abs(a.at - time) - Math.abs(b.at - time))[0];
    return near && Math.abs(near.at - time) <= GAP_SECONDS ? near : null;
  }

  function draw() {
    const [begin, end] = range.limits();
    const shown = points.slice(Math.max(after(points, begin) - 1, 0), after(points, end) + 1);
    let most = null;
    for (const each of shown) if (each.at >= begin) for (const { value } of series) if (value(each) !== null && value(each) !== undefined) most = Math.max(most === null ? 0 : most, value(each));
    const limit = niceTop(most, show === format.bytes);
    const place = (time) => ((time - begin) / (end - begin)) * WIDTH;
    series.forEach(({ value }, index) => {
      let path = "";
      let last = null;
      let bucket = null;
      const flush = () => {
        if (!bucket) return;
        path += (last !== null && bucket.at - last <= GAP_SECONDS ? "L" : "M") + place(bucket.at).toFixed(1) + " " + (HEIGHT - 1 - (bucket.value / limit) * (HEIGHT - 4)).toFixed(1);
        if (last === null || bucket.at - last > GAP_SECONDS) path += "h0.01";
        last = bucket.until;
        bucket = null;
      };
      for (const each of shown) {
        const found = value(each);
        if (found === null || found === undefined) { flush(); last = null; continue; }
        // Many points at one place of the picture are drawn as the largest of them.
        const number = Math.floor((place(each.at) / WIDTH) * BUCKETS);
        if (bucket && bucket.number !== number) flush();
        if (!bucket) bucket = { number, at: each.at, value: found };
        if (found > bucket.value) bucket.value = found;
        bucket.until = each.at;
      }
      flush();
      lines[index].setAttribute("d", path);
    });
    const isRead = range.cursor !== null && range.cursor >= begin && range.cursor <= end;
    const read = isRead ? pointAt(range.cursor) : points.at(-1);
    series.forEach(({ value }, index) => {
      const found = read ? value(read) : null;
      setText(values[index], found === null || found === undefined ? "–" : show(found));
    });
    pointer.setAttribute("visibility", isRead ? "visible" : "hidden");
    for (const side of ["x1", "x2"]) pointer.setAttribute(side, isRead ? place(range.cursor).toFixed(1) : 0);
    const ends = dragged === null || range.cursor === null ? null : [place(dragged), place(range.cursor)].sort((a, b) => a - b);
    chosen.setAttribute("visibility", ends ? "visible" : "hidden");
    if (ends) { chosen.setAttribute("x", ends[0]); chosen.setAttribute("width", ends[1] - ends[0]); }
    setText(scale, most === null ? "" : show(limit));
    setText(none, most === null ? (points.length ? empty || "no values in this time" : "waiting for the server") : "");
    setText(from, format.clock(begin));
    setText(until, isRead ? format.clock(range.cursor) : format.clock(end));
    setClass(until, "read", isRead);
    plot.setAttribute("aria-valuemax", Math.round(end - begin));
    plot.setAttribute("aria-valuenow", Math.round((isRead ? range.cursor : end) - begin));
    plot.setAttribute("aria-valuetext", format.clock(isRead ? range.cursor : end) + ": " + series.map((each, index) => (each.title + " " + values[index].textContent).trim()).join(", "));
  }

  range.listeners.push(draw);
  return { element, update(given) { points = given; range.first = points.length ? points[0].at : 0; draw(); } };
}
