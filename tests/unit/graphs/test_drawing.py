from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree as ET

from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.plan import draw_graph
from ovmstrio.util.drawing import Drawing, to_mermaid, to_svg

SVG = "{http://www.w3.org/2000/svg}"

TEXT = """
input_stream: "OVMS_PY_TENSOR:first" input_stream: "second" input_side_packet: "S:given"
output_stream: "OVMS_PY_TENSOR:answer" output_stream: "nothing"
node { name: "last" calculator: "B" max_in_flight: 2
  input_stream: "A:tokens" input_stream: "B:second" output_stream: "OUT:answer" input_side_packet: "S:given" }
node { name: "loop" calculator: "A"
  input_stream: "IN:first" input_stream: "LOOPBACK:back" input_stream: "lost"
  input_stream_info { tag_index: "LOOPBACK" back_edge: true }
  input_stream_handler { input_stream_handler: "SyncSetInputStreamHandler"
    options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } } }
  output_stream: "OUT:tokens" output_stream: "LOOPBACK:back" }
"""


def drawn(text: str) -> Drawing:
    config = parse_graph_text(text, "g").config
    assert config is not None
    return draw_graph(config)


def test_boxes_are_below_their_sources() -> None:
    layers = drawn(TEXT).layers
    assert [[box.title for box in layer] for layer in layers] == [
        ["first", "second", "given"],
        ["loop"],
        ["last"],
        ["answer", "nothing"],
    ]
    assert [box.subtitle for box in layers[0]] == ["OVMS_PY_TENSOR", "", "side packet S"]
    assert layers[1][0].notes == ("SyncSet {LOOPBACK:0}",)
    assert layers[2][0].notes == ("2 in flight",)


def test_edges_have_the_tags_of_both_ends() -> None:
    edges = [(edge.source, edge.label, edge.target, edge.is_back, edge.is_side) for edge in drawn(TEXT).edges]
    assert edges == [
        ("n1", "OUT tokens A", "n0", False, False),
        ("i1", "second B", "n0", False, False),
        ("s0", "given S", "n0", False, True),
        ("i0", "first IN", "n1", False, False),
        ("n1", "LOOPBACK back LOOPBACK", "n1", True, False),
        ("n0", "OUT answer", "o0", False, False),
    ]


def test_cycle_is_cut_at_the_first_node() -> None:
    nodes = [
        f'node {{ name: "{name}" input_stream: "{source}" output_stream: "{name}" }}' for name, source in ("ab", "ba")
    ]
    layers = drawn(" ".join(nodes)).layers
    assert [[box.title for box in layer] for layer in layers] == [["a"], ["b"]]


def test_mermaid_has_a_line_for_each_box_and_edge() -> None:
    lines = to_mermaid(drawn(TEXT)).splitlines()
    assert lines[0] == "flowchart TB"
    assert '  i0(["first<br/>OVMS_PY_TENSOR"])' in lines
    assert '  n1["loop<br/>A<br/>SyncSet {LOOPBACK:0}"]' in lines
    assert '  n1 -.->|"LOOPBACK back LOOPBACK"| n1' in lines
    assert '  s0 ==>|"given S"| n0' in lines
    assert '  n0 -->|"OUT answer"| o0' in lines
    assert len(lines) == 1 + 7 + 6


def test_svg_has_every_box_and_edge_inside_its_borders() -> None:
    root = ET.fromstring(to_svg(drawn(TEXT)))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    boxes = [each for each in root.iter(f"{SVG}rect") if "class" in each.attrib]
    assert sorted(box.attrib["class"] for box in boxes) == ["input"] * 3 + ["node"] * 2 + ["output"] * 2
    spans = []
    for box in boxes:
        x, y, box_width, box_height = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + box_width <= width
        assert 0 <= y <= y + box_height <= height
        spans.append((y, x, x + box_width))
    for (top, _, right), (next_top, left, _) in pairwise(sorted(spans)):
        assert top < next_top or right < left
    paths = [path.attrib["class"] for path in root.iter(f"{SVG}path")]
    assert sorted(paths) == ["back", "side", "stream", "stream", "stream", "stream", "tip"]
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"loop", "A", "SyncSet {LOOPBACK:0}", "LOOPBACK back LOOPBACK", "OUT tokens A"} <= texts


def test_names_are_escaped() -> None:
    drawing = drawn('node { name: "<b>&\\"\\n" calculator: "]" }')
    assert '  n0["#lt;b#gt;#amp;#quot;<br/>]"]' in to_mermaid(drawing).splitlines()
    root = ET.fromstring(to_svg(drawing))
    assert '<b>&"\n' in {text.text for text in root.iter(f"{SVG}text")}


def test_empty_graph_is_an_empty_picture() -> None:
    drawing = drawn('type: "x"')
    assert drawing.layers == ()
    assert to_mermaid(drawing) == "flowchart TB\n"
    assert ET.fromstring(to_svg(drawing)).tag == f"{SVG}svg"
