// Graph drawings with live figures: layers from left to right, or top to bottom on narrow screens.

import { h, s, setClass, setText } from "./dom.js";
import * as format from "./format.js";

const WIDE = { width: 172, gapAlong: 74, gapAcross: 24 };
const TALL = { width: 150, gapAlong: 54, gapAcross: 14 };
const LINE = 15;
const PAD = 9;
const MARGIN = 14;
const FIGURES = 3;
const LETTER = 6.7;
const SWEEPS = 6;

function cut(text, most) {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

// Layers with a dummy node for every edge that crosses a layer, so that edges do not run through boxes.
function layered(drawing) {
  const rank = new Map();
  drawing.layers.forEach((layer, index) => layer.forEach((box) => rank.set(box.key, index)));
  const layers = drawing.layers.map((layer) => layer.map((box) => ({ id: box.key, box })));
  const chains = drawing.edges.map((edge, number) => {
    const from = rank.get(edge.source);
    const to = rank.get(edge.target);
    if (from === undefined || to === undefined) return null;
    const chain = [edge.source];
    if (to > from) {
      for (let index = from + 1; index < to; index++) {
        const id = "-" + number + "-" + index;
        layers[index].push({ id, box: null });
        chain.push(id);
      }
    }
    chain.push(edge.target);
    return chain;
  });
  return { layers, chains, rank };
}

// Orders each layer by the barycenter of its neighbours, alternating direction.
function untangle(layers, chains) {
  const before = new Map();
  const after = new Map();
  const join = (map, key, other) => { if (!map.has(key)) map.set(key, []); map.get(key).push(other); };
  for (const chain of chains) {
    if (!chain) continue;
    for (let index = 1; index < chain.length; index++) {
      join(before, chain[index], chain[index - 1]);
      join(after, chain[index - 1], chain[index]);
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const forth = sweep % 2 === 0;
    const order = forth ? layers.slice(1) : layers.slice(0, -1).reverse();
    const joined = forth ? before : after;
    for (const layer of order) {
      const place = new Map();
      layers.forEach((each) => each.forEach((node, index) => place.set(node.id, (index + 0.5) / each.length)));
      const middle = (node, index) => {
        const others = (joined.get(node.id) || []).filter((id) => place.has(id));
        return others.length ? others.reduce((sum, id) => sum + place.get(id), 0) / others.length : (index + 0.5) / layer.length;
      };
      const values = new Map(layer.map((node, index) => [node.id, middle(node, index)]));
      layer.sort((a, b) => values.get(a.id) - values.get(b.id));
    }
  }
}

function heightOf(node) {
  if (!node.box) return 10;
  const lines = 1 + (node.box.subtitle ? 1 : 0) + node.box.notes.length + (node.box.kind === "node" ? FIGURES : 0);
  return lines * LINE + 2 * PAD;
}

function place(layers, isTall) {
  const form = isTall ? TALL : WIDE;
  const frames = new Map();
  const along = (node) => (isTall ? heightOf(node) : form.width);
  const across = (node) => (isTall ? (node.box ? form.width : 12) : heightOf(node));
  const sizes = layers.map((layer) => layer.reduce((sum, node) => sum + across(node) + form.gapAcross, -form.gapAcross));
  const widest = Math.max(...sizes, 0);
  let at = MARGIN;
  layers.forEach((layer, index) => {
    let side = MARGIN + (widest - sizes[index]) / 2;
    const depth = Math.max(...layer.map(along), 0);
    for (const node of layer) {
      const frame = isTall
        ? { x: side, y: at, width: across(node), height: node.box ? along(node) : depth }
        : { x: at, y: side, width: form.width, height: across(node) };
      frames.set(node.id, frame);
      side += across(node) + form.gapAcross;
    }
    at += depth + form.gapAlong;
  });
  const total = at - form.gapAlong + MARGIN;
  return isTall ? { frames, width: widest + 2 * MARGIN, height: total } : { frames, width: total, height: widest + 2 * MARGIN };
}

function curve(points, isTall) {
  let path = "M" + points[0].x + " " + points[0].y;
  for (let index = 1; index < points.length; index++) {
    const [a, b] = [points[index - 1], points[index]];
    if (isTall) {
      const middle = (a.y + b.y) / 2;
      path += "C" + a.x + " " + middle + " " + b.x + " " + middle + " " + b.x + " " + b.y;
    } else {
      const middle = (a.x + b.x) / 2;
      path += "C" + middle + " " + a.y + " " + middle + " " + b.y + " " + b.x + " " + b.y;
    }
  }
  return path;
}

function shares(drawing, rank) {
  const leaving = new Map();
  const coming = new Map();
  const isForward = (edge) => rank.get(edge.target) > rank.get(edge.source);
  drawing.edges.forEach((edge, number) => {
    if (!isForward(edge)) return;
    for (const [map, key] of [[leaving, edge.source], [coming, edge.target]]) {
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(number);
    }
  });
  return { leaving, coming };
}

export function draw(drawing, isTall, name) {
  const { layers, chains, rank } = layered(drawing);
  untangle(layers, chains);
  const { frames, width, height } = place(layers, isTall);
  const order = new Map();
  layers.forEach((layer) => layer.forEach((node, index) => order.set(node.id, index)));
  const { leaving, coming } = shares(drawing, rank);
  for (const [key, numbers] of leaving) numbers.sort((a, b) => order.get(chains[a][1]) - order.get(chains[b][1]));
  for (const [key, numbers] of coming) numbers.sort((a, b) => order.get(chains[a].at(-2)) - order.get(chains[b].at(-2)));
  const edges = [];
  const nodes = new Map();
  const back = drawing.edges.some((edge) => rank.get(edge.target) <= rank.get(edge.source));
  const lane = back ? 46 : 0;
  const extent = isTall ? { width: width + lane + 40 * (back ? 1 : 0), height } : { width, height: height + lane };
  const picture = s("svg.drawing", {
    viewBox: "0 0 " + extent.width + " " + extent.height, width: extent.width, height: extent.height, role: "img",
    "aria-label": "Graph of " + name + "; the table below has the same figures",
  });
  picture.append(s("defs", {}, s("marker", {
    id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto",
  }, s("path.tip", { d: "M0 0.5L7.5 4L0 7.5z" }))));

  drawing.edges.forEach((edge, number) => {
    const chain = chains[number];
    if (!chain) return;
    const [from, to] = [frames.get(edge.source), frames.get(edge.target)];
    let path;
    let label;
    let turn = "middle";
    if (rank.get(edge.target) > rank.get(edge.source)) {
      const out = leaving.get(edge.source);
      const into = coming.get(edge.target);
      const leave = (out.indexOf(number) + 1) / (out.length + 1);
      const arrive = (into.indexOf(number) + 1) / (into.length + 1);
      const start = isTall ? { x: from.x + from.width * leave, y: from.y + from.height } : { x: from.x + from.width, y: from.y + from.height * leave };
      const end = isTall ? { x: to.x + to.width * arrive, y: to.y } : { x: to.x, y: to.y + to.height * arrive };
      const points = [start];
      for (const id of chain.slice(1, -1)) {
        const frame = frames.get(id);
        if (isTall) points.push({ x: frame.x + frame.width / 2, y: frame.y }, { x: frame.x + frame.width / 2, y: frame.y + frame.height });
        else points.push({ x: frame.x, y: frame.y + frame.height / 2 }, { x: frame.x + frame.width, y: frame.y + frame.height / 2 });
      }
      points.push(end);
      path = curve(points, isTall);
      const last = points.at(-2);
      label = isTall ? { x: end.x + 5, y: end.y - 12 } : { x: (last.x + end.x) / 2, y: (last.y + end.y) / 2 - 4 };
      if (isTall) turn = "start";
      else if (Math.abs(last.y - end.y) > 8) { label = { x: end.x - 9, y: last.y < end.y ? end.y + 13 : end.y - 5 }; turn = "end"; }
    } else if (isTall) {
      const out = width + 24;
      path = "M" + (from.x + from.width) + " " + (from.y + from.height * 0.7) + "C" + out + " " + (from.y + from.height) + " " + out + " " + to.y + " " + (to.x + to.width) + " " + (to.y + to.height * 0.3);
      label = { x: extent.width - 4, y: Math.min(from.y, to.y) + 6 };
      turn = "end";
    } else {
      const low = height + 22;
      const [leave, arrive] = [from.x + from.width * 0.75, to.x + to.width * 0.25];
      path = "M" + leave + " " + (from.y + from.height) + "C" + leave + " " + low + " " + arrive + " " + low + " " + arrive + " " + (to.y + to.height);
      label = { x: (from.x + to.x + from.width) / 2, y: height + lane - 24 };
    }
    const kind = edge.is_back ? "back" : edge.is_side ? "side" : "forward";
    const line = s("path.edge." + kind, { d: path, "marker-end": "url(#tip)" });
    const text = s("text.label", { x: label.x, y: label.y, "text-anchor": turn });
    const words = cut(edge.stream, 18);
    setText(text, words);
    const title = s("title", {}, edge.label || edge.stream);
    picture.append(s("g", {}, title, line, text));
    edges.push({ edge, number, line, text, words, title });
  });

  for (const layer of layers) {
    for (const { id, box } of layer) {
      if (!box) continue;
      const frame = frames.get(id);
      const group = s("g.box." + box.kind, { transform: "translate(" + frame.x + " " + frame.y + ")" });
      group.append(s("title", {}, [box.title, box.subtitle, ...box.notes].filter(Boolean).join("\n")));
      group.append(s("rect", { width: frame.width, height: frame.height, rx: box.kind === "node" ? 4 : 12 }));
      let y = PAD + LINE - 4;
      const write = (text, kind) => {
        const line = s("text" + (kind ? "." + kind : ""), { x: PAD, y });
        setText(line, cut(text, Math.floor(frame.width / LETTER)));
        group.append(line);
        y += LINE;
        return line;
      };
      write(box.title, "title");
      if (box.subtitle) write(box.subtitle, "subtitle");
      for (const note of box.notes) write(note, "note");
      if (box.kind === "node") nodes.set(id, { group, box, rates: write("", "figures"), now: write("", "figures"), counts: write("", "figures") });
      picture.append(group);
    }
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
      setText(node.rates, "");
      continue;
    }
    setText(node.rates, (tally.rate === null ? "" : format.rate(tally.rate) + "/s  ") + format.ms(tally.mean));
    const now = tally.late === null ? [] : ["p99 " + format.ms(tally.late)];
    if (tally.active) now.push(tally.active + " now");
    if (tally.waiting) now.push(tally.waiting + " waiting");
    setText(node.now, now.join(" · "));
    const rest = [format.count(tally.runs) + " runs"];
    if (tally.failures) rest.push(format.count(tally.failures) + " failed");
    setText(node.counts, rest.join(" · "));
    setClass(node.group, "busy", tally.rate > 0 || tally.active > 0);
    setClass(node.group, "failed", tally.failures > 0);
    setClass(node.group, "failing", tally.failing);
  }
  for (const { edge, number, line, text, words } of drawn.edges) {
    const source = figures.nodes[edge.source];
    const stream = figures.streams[number] || (source ? { passed: source.runs - source.failures, rate: source.rate } : null);
    if (!stream || edge.is_side) continue;
    setText(text, [words, format.count(stream.passed)].filter(Boolean).join(" "));
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
    ["Node", "Runs"].map((title, index) => h("th", { scope: "col" }, index ? "Operation" : title)),
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
