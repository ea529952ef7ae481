// Layered graph layout with room for edge labels (after Sugiyama); a pure function of sizes, without a document.
//
// Box layers alternate with label layers. Every edge that passes a layer has a separate slot there, and an edge label
// is such a slot. Edges are parallel to the flow within a layer and bend only in the gaps between layers, which hold
// nothing else. So no edge crosses a box or the label of another edge, and no label touches a box or another label.
//
// Coordinates here: `along` is the direction of the flow, `across` the other one; layout() converts them at its end.

const GAP = 26;
const MARGIN = 12;
const ORDER_SWEEPS = 12;
const POSITION_SWEEPS = 60;
const BULGE = 0.9;
const SPACE = { box: 22, label: 14, line: 10 };
const LINE_SIZE = 4;
const LINE_DISTANCE = 4;

// A slot of a layer: a box, a label, or the passage of an edge. `anchor` is where edges meet it, from its start.
function slot(kind, key, across, along, anchor) {
  return { kind, key, across, along, anchor, before: [], after: [], isBack: false, at: 0, place: 0 };
}

function labelSlot(label, isTall) {
  if (!label.width) return slot("line", "", LINE_SIZE, 0, LINE_SIZE / 2);
  // The label is above its edge, or right of it if the flow is downwards.
  return isTall
    ? slot("label", "", label.width + LINE_DISTANCE, label.height, 0)
    : slot("label", "", label.height + LINE_DISTANCE, label.width, label.height + LINE_DISTANCE);
}

function buildLayers(boxLayers, edges, isTall) {
  const layers = Array.from({ length: Math.max(2 * boxLayers.length - 1, 0) }, () => []);
  const boxes = new Map();
  const rank = new Map();
  boxLayers.forEach((boxLayer, index) => boxLayer.forEach((box) => {
    const [across, along] = isTall ? [box.width, box.height] : [box.height, box.width];
    const made = slot("box", box.key, across, along, across / 2);
    boxes.set(box.key, made);
    rank.set(box.key, 2 * index);
    layers[2 * index].push(made);
  }));
  const labels = new Array(layers.length).fill(0);
  const chains = edges.map((edge) => {
    const [from, to] = [rank.get(edge.source), rank.get(edge.target)];
    if (from === undefined || to === undefined) return null;
    const isForward = from < to;
    const [first, last] = isForward ? [from + 1, to - 1] : [to, from];
    let labelled = first;
    for (let index = first; index <= last; index++) {
      if (index % 2 && (labelled % 2 === 0 || labels[index] < labels[labelled])) labelled = index;
    }
    labels[labelled]++;
    const slots = [];
    for (let index = first; index <= last; index++) {
      const made = index === labelled ? labelSlot(edge.label, isTall) : slot("line", "", LINE_SIZE, 0, LINE_SIZE / 2);
      made.isBack = !isForward;
      made.edge = edge;
      layers[index].push(made);
      slots.push(made);
    }
    const chain = isForward ? [boxes.get(edge.source), ...slots, boxes.get(edge.target)] : slots;
    for (let index = 1; index < chain.length; index++) {
      chain[index].before.push(chain[index - 1]);
      chain[index - 1].after.push(chain[index]);
    }
    return { edge, isForward, slots, first, source: boxes.get(edge.source), target: boxes.get(edge.target), labelled: slots[labelled - first] };
  });
  return { layers, chains };
}

function crossings(layers) {
  let count = 0;
  for (const layer of layers) {
    const ends = layer.flatMap((each) => each.after.map((other) => other.place));
    for (let one = 0; one < ends.length; one++) for (let two = one + 1; two < ends.length; two++) if (ends[one] > ends[two]) count++;
  }
  return count;
}

// Orders each layer by the mean place of its neighbours; back edges come last. Keeps the order with the fewest crossings.
function orderLayers(layers) {
  const number = () => layers.forEach((layer) => layer.forEach((each, index) => { each.place = index; }));
  number();
  let best = layers.map((layer) => [...layer]);
  let fewest = crossings(layers);
  for (let sweep = 0; sweep < ORDER_SWEEPS && fewest; sweep++) {
    const isForth = sweep % 2 === 0;
    for (const layer of isForth ? layers.slice(1) : layers.slice(0, -1).reverse()) {
      const value = new Map(layer.map((each) => {
        const others = isForth ? each.before : each.after;
        const mean = others.length ? others.reduce((sum, other) => sum + other.place, 0) / others.length : each.place;
        return [each, each.isBack ? layer.length * layers.length + each.place : mean];
      }));
      layer.sort((a, b) => value.get(a) - value.get(b));
      layer.forEach((each, index) => { each.place = index; });
    }
    const now = crossings(layers);
    if (now < fewest) [fewest, best] = [now, layers.map((layer) => [...layer])];
  }
  best.forEach((layer, index) => { layers[index] = layer; });
  layers.forEach((layer) => layer.sort((a, b) => a.isBack - b.isBack));
  number();
}

// Moves the slots of a layer to their wanted positions as far as order and distances permit (isotonic regression).
function settle(layer, wanted) {
  let offset = 0;
  const groups = [];
  layer.forEach((each, index) => {
    if (index) offset += layer[index - 1].across + (SPACE[layer[index - 1].kind] + SPACE[each.kind]) / 2;
    each.offset = offset;
    const [position, weight] = wanted(each);
    groups.push({ sum: (position - each.anchor - offset) * weight, weight, members: [each] });
    while (groups.length > 1 && groups.at(-2).sum / groups.at(-2).weight > groups.at(-1).sum / groups.at(-1).weight) {
      const last = groups.pop();
      const joined = groups.at(-1);
      joined.sum += last.sum;
      joined.weight += last.weight;
      joined.members.push(...last.members);
    }
  });
  for (const group of groups) for (const each of group.members) each.at = group.sum / group.weight + each.offset;
}

function placeAcross(layers) {
  layers.forEach((layer) => settle(layer, () => [0, 1]));
  const middle = (each) => each.at + each.anchor;
  const straight = (each, other) => (each.kind === "box" ? 1 : 2) * (other.kind === "box" ? 1 : 4);
  for (let sweep = 0; sweep < POSITION_SWEEPS; sweep++) {
    const isForth = sweep % 2 === 0;
    const isLast = sweep >= POSITION_SWEEPS / 2;
    for (const layer of isForth ? layers : [...layers].reverse()) {
      settle(layer, (each) => {
        const others = isLast ? [...each.before, ...each.after] : isForth ? each.before : each.after;
        const weight = others.reduce((sum, other) => sum + straight(each, other), 0);
        if (!weight) return [middle(each), each.isBack ? 0.5 : 0.1];
        return [others.reduce((sum, other) => sum + middle(other) * straight(each, other), 0) / weight, weight];
      });
    }
  }
  const start = Math.min(...layers.flat().map((each) => each.at));
  for (const each of layers.flat()) each.at += MARGIN - start;
  return Math.max(0, ...layers.flat().map((each) => each.at + each.across)) + MARGIN;
}

function placeAlong(layers, chains) {
  const reaches = (rank) => chains.some((chain) => chain && !chain.isForward && (rank === 0 ? chain.first === 0 : chain.first + chain.slots.length - 1 === rank));
  let at = MARGIN + (reaches(0) ? GAP : 0);
  const bands = layers.map((layer) => {
    const band = { start: at, end: at + Math.max(0, ...layer.map((each) => each.along)) };
    at = band.end + GAP;
    return band;
  });
  return { bands, length: at - GAP + MARGIN + (layers.length && reaches(layers.length - 1) ? GAP : 0) };
}

// Positions of the edges' ends on each box, in the order of the slots that they lead to.
function ports(chains) {
  const ends = { source: new Map(), target: new Map() };
  for (const chain of chains) {
    if (!chain) continue;
    for (const side of ["source", "target"]) {
      const isFirst = (side === "source") === chain.isForward;
      // Slots of back edges are in the order of the layers, against the direction of the edge.
      const next = chain.isForward ? chain.slots.at(isFirst ? 0 : -1) : chain.slots.at(side === "source" ? -1 : 0);
      const box = chain[side];
      if (!ends[side].has(box)) ends[side].set(box, []);
      ends[side].get(box).push({ chain, next });
    }
  }
  const found = { source: new Map(), target: new Map() };
  for (const side of ["source", "target"]) {
    for (const [box, list] of ends[side]) {
      list.sort((a, b) => a.next.at + a.next.anchor - b.next.at - b.next.anchor);
      list.forEach(({ chain }, index) => found[side].set(chain, box.at + (box.across * (index + 1)) / (list.length + 1)));
    }
  }
  return found;
}

function route(chain, bands, port) {
  const line = [];
  const move = (along, across) => line.push({ kind: line.length ? "line" : "start", points: [[along, across]] });
  const bend = (along, across) => {
    const [last, lastAcross] = line.at(-1).points.at(-1);
    if (lastAcross === across) move(along, across);
    else line.push({ kind: "curve", points: [[(last + along) / 2, lastAcross], [(last + along) / 2, across], [along, across]] });
  };
  const turn = (across, direction) => {
    const [last, lastAcross] = line.at(-1).points.at(-1);
    const out = last + direction * GAP * BULGE;
    line.push({ kind: "curve", points: [[out, lastAcross], [out, across], [last, across]] });
  };
  const center = (each) => each.at + each.anchor;
  const [leave, arrive] = [port.source.get(chain), port.target.get(chain)];
  if (chain.isForward) {
    const own = bands[chain.first - 1];
    move(own.start + chain.source.along, leave);
    move(own.end, leave);
    chain.slots.forEach((each, index) => {
      bend(bands[chain.first + index].start, center(each));
      move(bands[chain.first + index].end, center(each));
    });
    bend(bands[chain.first + chain.slots.length].start, arrive);
  } else {
    const last = chain.first + chain.slots.length - 1;
    move(bands[last].start + chain.source.along, leave);
    move(bands[last].end, leave);
    turn(center(chain.slots.at(-1)), 1);
    move(bands[last].start, center(chain.slots.at(-1)));
    for (let index = chain.slots.length - 2; index >= 0; index--) {
      bend(bands[chain.first + index].end, center(chain.slots[index]));
      move(bands[chain.first + index].start, center(chain.slots[index]));
    }
    turn(arrive, -1);
  }
  return line;
}

// layers: lists of { key, width, height }; edges: lists of { source, target, label: { width, height } }.
// Returns frames of boxes by key, and for each edge its path, and the frame of its label; null for an edge of unknown boxes.
export function layout(boxLayers, edges, isTall) {
  const { layers, chains } = buildLayers(boxLayers.filter((layer) => layer.length), edges, isTall);
  orderLayers(layers);
  const across = placeAcross(layers);
  const { bands, length } = placeAlong(layers, chains);
  const port = ports(chains);
  const point = ([u, v]) => (isTall ? v.toFixed(1) + " " + u.toFixed(1) : u.toFixed(1) + " " + v.toFixed(1));
  const frame = (start, each, own) => (isTall
    ? { x: each.at + (own ? LINE_DISTANCE : 0), y: start, width: each.across - (own ? LINE_DISTANCE : 0), height: each.along }
    : { x: start, y: each.at, width: each.along, height: each.across - (own ? LINE_DISTANCE : 0) });
  const frames = new Map();
  layers.forEach((layer, index) => layer.forEach((each) => { if (each.kind === "box") frames.set(each.key, frame(bands[index].start, each, false)); }));
  const routes = chains.map((chain) => {
    if (!chain) return null;
    const path = route(chain, bands, port).map(({ kind, points }) => ({ start: "M", line: "L", curve: "C" })[kind] + points.map(point).join(" ")).join("");
    const band = bands[chain.first + chain.slots.indexOf(chain.labelled)];
    const label = chain.labelled.kind === "label" ? frame((band.start + band.end - chain.labelled.along) / 2, chain.labelled, true) : null;
    return { path, label };
  });
  return { frames, routes, width: isTall ? across : length, height: isTall ? length : across };
}
