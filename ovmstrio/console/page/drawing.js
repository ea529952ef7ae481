// Graph drawings with live figures: from left to right, or top to bottom on narrow screens.

import { h, s, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { layout } from "./layout.js";

const WIDE = { least: 150, most: 250, label: 140 };
const TALL = { least: 120, most: 160, label: 104 };
const LINE = 15;
const LABEL_LINE = 12.5;
const LABEL_LINES = 2;
const PAD = 9;
const FIGURES = 3;
const FAMILY = "system-ui, -apple-system, \"Segoe UI\", Roboto, \"DejaVu Sans\", sans-serif";
const FONTS = { title: "650 12.5px ", subtitle: "10.5px ", note: "10.5px ", figures: "11px ", label: "10.5px " };
const ROOM_FOR_COUNT = "999.9M";

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, kind) {
  pen.font = FONTS[kind] + FAMILY;
  return pen.measureText(text).width;
}

// Shortens a text to a width in pixels.
function fit(text, kind, width) {
  if (widthOf(text, kind) <= width) return text;
  let length = text.length;
  while (length > 1 && widthOf(text.slice(0, length) + "…", kind) > width) length--;
  return text.slice(0, length) + "…";
}

// Breaks a name into at most two lines, after a separator if there is one, and shortens the rest.
function wrap(text, kind, width) {
  const lines = [];
  let rest = text;
  while (rest && lines.length < LABEL_LINES - 1 && widthOf(rest, kind) > width) {
    let length = rest.length;
    while (length > 1 && widthOf(rest.slice(0, length), kind) > width) length--;
    const cut = /^.*[_\-./: ]/.exec(rest.slice(0, length));
    if (cut && cut[0].length > length / 3) length = cut[0].length;
    lines.push(rest.slice(0, length));
    rest = rest.slice(length);
  }
  if (rest) lines.push(fit(rest, kind, width));
  return lines;
}

function heightOf(box) {
  const lines = 1 + (box.subtitle ? 1 : 0) + box.notes.length + (box.kind === "node" ? FIGURES : 0);
  return lines * LINE + 2 * PAD;
}

// Boxes are as wide as their texts, and those of a layer equally wide.
function widthsOf(layers, form) {
  return layers.map((layer) => {
    const texts = layer.flatMap((box) => [[box.title, "title"], [box.subtitle || "", "subtitle"], ...box.notes.map((note) => [note, "note"])]);
    const widest = Math.max(0, ...texts.map(([text, kind]) => widthOf(text, kind)));
    return Math.min(Math.max(Math.ceil(widest) + 2 * PAD + 2, form.least), form.most);
  });
}

// The lines of an edge's label: its stream, and the number of packets that passed.
function labelOf(edge, width) {
  const names = wrap(edge.stream, "label", width);
  const counts = edge.is_side ? 0 : 1;
  if (!names.length && !counts) return { names, width: 0, height: 0 };
  const widest = Math.max(...names.map((name) => widthOf(name, "label")), counts ? widthOf(ROOM_FOR_COUNT, "label") : 0);
  return { names, width: Math.ceil(widest) + 2, height: (names.length + counts) * LABEL_LINE };
}

let drawn = 0;

export function draw(drawing, isTall, name) {
  const form = isTall ? TALL : WIDE;
  const labels = drawing.edges.map((edge) => labelOf(edge, form.label));
  const widths = widthsOf(drawing.layers, form);
  const { frames, routes, width, height } = layout(
    drawing.layers.map((layer, index) => layer.map((box) => ({ key: box.key, width: widths[index], height: heightOf(box) }))),
    drawing.edges.map((edge, number) => ({ ...edge, label: labels[number] })), isTall);
  const tip = "tip-" + ++drawn;
  const picture = s("svg.drawing", {
    viewBox: "0 0 " + width + " " + height, width, height, role: "img",
    "aria-label": "Graph of " + name + "; the table below has the same figures",
  });
  picture.append(s("defs", {}, s("marker", {
    id: tip, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto",
  }, s("path.tip", { d: "M0 0.5L7.5 4L0 7.5z" }))));
  const edges = [];
  drawing.edges.forEach((edge, number) => {
    if (!routes[number]) return;
    const { path, label: frame } = routes[number];
    const kind = edge.is_back ? "back" : edge.is_side ? "side" : "forward";
    const line = s("path.edge." + kind, { d: path, "marker-end": "url(#" + tip + ")" });
    const label = s("text.label");
    const write = (text, row) => {
      const x = isTall ? frame.x : frame.x + frame.width / 2;
      const part = s("tspan", { x, y: frame.y + (row + 0.8) * LABEL_LINE, "text-anchor": isTall ? "start" : "middle" }, text);
      label.append(part);
      return part;
    };
    const names = labels[number].names;
    if (frame) names.forEach(write);
    const count = frame && !edge.is_side ? write("", names.length) : null;
    picture.append(s("g", {}, s("title", {}, edge.label || edge.stream), line, label));
    edges.push({ edge, number, line, count });
  });

  const nodes = new Map();
  for (const box of drawing.layers.flat()) {
    const frame = frames.get(box.key);
    const group = s("g.box." + box.kind, { transform: "translate(" + frame.x + " " + frame.y + ")" });
    group.append(s("title", {}, [box.title, box.subtitle, ...box.notes].filter(Boolean).join("\n")));
    group.append(s("rect", { width: frame.width, height: frame.height, rx: box.kind === "node" ? 4 : 12 }));
    let y = PAD + LINE - 4;
    const write = (kind, text) => {
      const line = s("text." + kind, { x: PAD, y });
      const set = (now) => setText(line, fit(now, kind, frame.width - 2 * PAD));
      set(text);
      group.append(line);
      y += LINE;
      return set;
    };
    write("title", box.title);
    if (box.subtitle) write("subtitle", box.subtitle);
    for (const note of box.notes) write("note", note);
    if (box.kind === "node") nodes.set(box.key, { group, box, rates: write("figures", ""), now: write("figures", ""), counts: write("figures", "") });
    picture.append(group);
  }
  return { picture, nodes, edges };
}

// Runs per latency bucket since an earlier snapshot.
function newer(before, now) {
  const found = {};
  for (const [band, count] of Object.entries(now)) if (count > (before[band] || 0)) found[band] = count - (before[band] || 0);
  return found;
}

// Latency quantile in milliseconds; buckets are sixths of a decade, the first ends at ten microseconds.
function quantile(times, part) {
  const bands = Object.keys(times).map(Number).sort((a, b) => a - b);
  const rank = part * bands.reduce((sum, band) => sum + times[band], 0);
  const end = (band) => 10 ** (band / 6 - 2);
  let below = 0;
  for (const band of bands) {
    if (below + times[band] >= rank) {
      const begin = band ? end(band - 1) : 0;
      return begin + ((end(band) - begin) * (rank - below)) / times[band];
    }
    below += times[band];
  }
  return null;
}

// Rates between two snapshots of the same counters.
export function between(before, now) {
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const nodes = {};
  for (const [key, tally] of Object.entries(now.nodes || {})) {
    const old = before && before.nodes ? before.nodes[key] : null;
    const runs = old && tally.runs >= old.runs ? tally.runs - old.runs : 0;
    const taken = old ? tally.seconds - old.seconds : 0;
    nodes[key] = {
      ...tally,
      rate: old && seconds > 0 ? runs / seconds : null,
      mean: runs > 0 ? (taken / runs) * 1000 : tally.runs ? (tally.seconds / tally.runs) * 1000 : null,
      late: runs > 0 ? quantile(newer(old.times, tally.times), 0.99) : tally.p99,
      isFresh: runs > 0,
      failing: Boolean(old && tally.failures > old.failures),
      waiting: now.waiting ? now.waiting[key] || 0 : 0,
    };
  }
  const streams = {};
  for (const [number, passed] of Object.entries(now.streams || {})) {
    const old = before && before.streams ? before.streams[number] : undefined;
    streams[number] = { passed, rate: old !== undefined && seconds > 0 ? Math.max(passed - old, 0) / seconds : null };
  }
  return { nodes, streams };
}

export function fill(drawn, figures) {
  for (const [key, node] of drawn.nodes) {
    const tally = figures.nodes[key];
    if (!tally) {
      node.rates("");
      continue;
    }
    node.rates((tally.rate === null ? "" : format.rate(tally.rate) + "/s  ") + format.ms(tally.mean));
    const now = tally.late === null ? [] : ["p99 " + format.ms(tally.late)];
    if (tally.active) now.push(tally.active + " now");
    if (tally.waiting) now.push(tally.waiting + " waiting");
    node.now(now.join(" · "));
    const rest = [format.count(tally.runs) + " runs"];
    if (tally.failures) rest.push(format.count(tally.failures) + " failed");
    node.counts(rest.join(" · "));
    setClass(node.group, "busy", tally.rate > 0 || tally.active > 0);
    setClass(node.group, "failed", tally.failures > 0);
    setClass(node.group, "failing", tally.failing);
  }
  for (const { edge, number, line, count } of drawn.edges) {
    const source = figures.nodes[edge.source];
    const stream = figures.streams[number] || (source ? { passed: source.runs - source.failures, rate: source.rate } : null);
    if (!stream || edge.is_side) continue;
    if (count) setText(count, format.count(stream.passed));
    setClass(line, "busy", stream.rate > 0);
  }
}

// The same figures as an accessible table.
export function nodeTable(drawing) {
  const boxes = drawing.layers.flat().filter((box) => box.kind === "node");
  const rows = new Map();
  const body = h("tbody");
  for (const box of boxes) {
    const cells = ["rate", "mean", "late", "runs", "failures", "active"].map((key) => [key, h("td.number", { "data-title": key })]);
    rows.set(box.key, Object.fromEntries(cells));
    body.append(h("tr", {}, h("td", {}, box.title), h("td", {}, box.subtitle), cells.map(([, cell]) => cell)));
  }
  const table = h("table", {}, h("thead", {}, h("tr", {},
    ["Node", "Operation"].map((title) => h("th", { scope: "col" }, title)),
    ["Runs/s", "Mean time", "p99", "Runs", "Failed", "Now"].map((title) => h("th.number", { scope: "col" }, title)))), body);
  return {
    element: h("details", {}, h("summary", {}, "Nodes as a table"), h("div.scroll", {}, table)),
    fill(figures) {
      for (const [key, cells] of rows) {
        const tally = figures.nodes[key];
        if (!tally) continue;
        setText(cells.rate, format.rate(tally.rate));
        setText(cells.mean, format.ms(tally.mean));
        setText(cells.late, format.ms(tally.late));
        setText(cells.runs, tally.runs);
        setText(cells.failures, tally.failures);
        setClass(cells.failures, "bad", tally.failures > 0);
        setText(cells.active, tally.active);
      }
    },
  };
}
