from __future__ import annotations

import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import pytest

from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from tests.support.served_in_thread import ServedInThread
    from tests.system.console.conftest import OpenPage

_OVERLAPS: Final = """async ([drawings, isTall]) => {
  const { draw, fill, between } = await import("/console/page/drawing.js");
  const inside = (x, y, box) => x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height;
  const meet = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  const shrunk = (box) => ({ x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1 });
  const wrong = [];
  let count = 0;
  drawings.forEach((drawing, seed) => {
    const drawn = draw(drawing, isTall, "graph");
    document.querySelector("main").replaceChildren(drawn.picture);
    const streams = Object.fromEntries(drawing.edges.map((edge, number) => [number, 987654321]));
    fill(drawn, between(null, { nodes: {}, streams }));
    const { width, height } = drawn.picture.viewBox.baseVal;
    const isOutside = (x, y) => x < 0 || y < 0 || x > width || y > height;
    const boxes = [...drawn.picture.querySelectorAll("g.box")].map((group) => {
      const { e, f } = group.transform.baseVal.consolidate().matrix;
      const size = group.querySelector("rect").getBBox();
      for (const text of group.querySelectorAll("text"))
        if (text.getBBox().width > size.width - 9) wrong.push([seed, "text wider than its box", text.textContent]);
      return shrunk({ x: e, y: f, width: size.width, height: size.height });
    });
    const lines = [...drawn.picture.querySelectorAll("path.edge")];
    const texts = lines.map((line) => line.parentNode.querySelector("text.label")).filter((each) => each.textContent);
    const labels = texts.map((each) => shrunk(each.getBBox()));
    count += labels.length;
    const all = [...boxes, ...labels];
    all.forEach((one, index) => {
      if (isOutside(one.x, one.y) || isOutside(one.x + one.width, one.y + one.height)) wrong.push([seed, "outside"]);
      for (const other of all.slice(index + 1)) if (meet(one, other)) wrong.push([seed, "overlap", one, other]);
    });
    for (const line of lines) {
      const length = line.getTotalLength();
      for (let at = 0; at <= length; at += 3) {
        const { x, y } = line.getPointAtLength(at);
        if (isOutside(x, y)) wrong.push([seed, "edge outside"]);
        if (all.some((each) => inside(x, y, each))) wrong.push([seed, "edge through a box or label", x, y]);
      }
    }
  });
  return { count, wrong: wrong.slice(0, 10) };
}"""
_WORDS: Final = (
    "image",
    "boxes",
    "a",
    "confidence_levels_of_all_regions",
    "text",
    "MMMMMMMMMMMMMMMMMMMMMMMMMMMM",
    "日本語の文字列",
    "",
)


def _random_drawing(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    nodes = [
        DrawnBox(
            f"n{number}",
            "node",
            f"{chance.choice(_WORDS)}{number}",
            chance.choice(["", "PythonExecutorCalculator", "W" * 60]),
            tuple(chance.choice(_WORDS) for _ in range(chance.randrange(3))),
        )
        for number in range(chance.randint(1, 12))
    ]
    inputs = [DrawnBox(f"i{number}", "input", chance.choice(_WORDS)) for number in range(chance.randint(1, 4))]
    outputs = [DrawnBox(f"o{number}", "output", chance.choice(_WORDS)) for number in range(chance.randint(1, 4))]
    edges = []
    for number in range(len(nodes)):
        sources = [*inputs, *nodes[:number]]
        for box in chance.choices(sources, k=chance.randint(1, 3)):
            is_side = chance.random() < 0.1
            edges.append(DrawnEdge(box.key, f"n{number}", chance.choice(_WORDS), "TAG", is_side=is_side))
    edges += [DrawnEdge(chance.choice(nodes).key, output.key, chance.choice(_WORDS)) for output in outputs]
    for _ in range(chance.randrange(4)):
        first, last = sorted(chance.choices(range(len(nodes)), k=2))
        edges.append(DrawnEdge(f"n{last}", f"n{first}", chance.choice(_WORDS), is_back=True))
    # An edge of a box that is not drawn is left out.
    edges.append(DrawnEdge("n0", "nothing", "lost"))
    drawing = arrange(inputs, nodes, outputs, edges)
    return _document(drawing)


def _document(drawing: Drawing) -> dict[str, Any]:
    edges = [{**asdict(each), "label": each.label} for each in drawing.edges]
    return {"layers": [[asdict(box) for box in layer] for layer in drawing.layers], "edges": edges}


@pytest.mark.parametrize("is_tall", [False, True])
def test_no_label_overlaps_a_box_a_label_or_an_edge(
    server: ServedInThread, open_page: OpenPage, *, is_tall: bool
) -> None:
    drawings = [_random_drawing(seed) for seed in range(40)]
    with open_page(f"{server.rest}/console#/log") as page:
        found = page.evaluate(_OVERLAPS, [drawings, is_tall])
    assert found["wrong"] == []
    assert found["count"] > 400


def test_a_long_stream_name_is_shortened_with_a_tooltip(server: ServedInThread, open_page: OpenPage) -> None:
    boxes = DrawnBox("a", "node", "first"), DrawnBox("b", "node", "second")
    edge = DrawnEdge("a", "b", "the_name_of_a_stream_" * 4)
    document = _document(Drawing(((boxes[0],), (boxes[1],)), (edge,)))
    with open_page(f"{server.rest}/console#/log") as page:
        shown = page.evaluate(
            """async (drawing) => {
              const { draw } = await import("/console/page/drawing.js");
              const group = draw(drawing, false, "graph").picture.querySelector("path.edge").parentNode;
              const lines = [...group.querySelectorAll("tspan")].map((each) => each.textContent).filter(Boolean);
              return [lines, group.querySelector("title").textContent];
            }""",
            document,
        )
    lines, title = shown
    assert len(lines) == 2
    assert lines[0] + lines[1][:-1] == edge.stream[: len(lines[0]) + len(lines[1]) - 1]
    assert lines[1].endswith("…")
    assert title == edge.stream
