from __future__ import annotations

from pathlib import Path

from ovmstrio.core.drawing import to_svg
from ovmstrio.runtimes.pipelines.pipeline_drawing import draw
from tests.support.pipelines import make_node, make_pipeline

NODES = [
    make_node("faces", {"image": "request.x"}, {"crops": "images"}, demultiply_count=3),
    make_node("parts", {"i": "faces.crops"}, demultiply_count=-1),
    make_node("eyes", {"b": "parts.y"}, ("a",), model_name="eye", version=2),
    make_node("best", {"i": "eyes.a"}, gather_from_node="parts"),
]
SPEC = make_pipeline(
    NODES, {"face": "best.y", "eye": "eyes.a"}, demultiply_count=1, libraries={"arithmetic": Path("/lib/sums.py")}
)


def test_boxes_have_what_they_call_and_their_level() -> None:
    drawing = draw(SPEC)
    boxes = [[(box.title, box.subtitle, *box.notes) for box in layer] for layer in drawing.layers]
    library = "library arithmetic (sums.py)"
    assert boxes == [
        [("x", "", "splits into 1 shard")],
        [("faces", library, "once for each shard of the request", "splits into 3 shards")],
        [("parts", library, "once for each shard of faces in the request", "splits into shards")],
        [("eyes", "model eye version 2", "once for each shard of parts in faces in the request")],
        [("best", library, "once for each shard of faces in the request", "gathers parts")],
        [("face", "", "gathers faces in the request"), ("eye", "", "gathers parts in faces in the request")],
    ]


def test_edges_have_the_names_of_outputs_aliases_and_inputs() -> None:
    edges = [(edge.source, edge.label, edge.target) for edge in draw(SPEC).edges]
    assert edges == [
        ("i0", "x image", "n0"),
        ("n0", "images crops i", "n1"),
        ("n1", "y b", "n2"),
        ("n2", "a i", "n3"),
        ("n3", "y", "o0"),
        ("n2", "a", "o1"),
    ]


def test_invalid_pipeline_is_drawn() -> None:
    nodes = [make_node("one", {"i": "two.y"}), make_node("two", {"i": "one.y", "j": "nobody.y", "k": "request.z"})]
    drawing = draw(make_pipeline(nodes, {"o": "two.z"}))
    assert [[box.title for box in layer] for layer in drawing.layers] == [["x"], ["one"], ["two"], ["o"]]
    assert [(edge.source, edge.target) for edge in drawing.edges] == [("n1", "n0"), ("n0", "n1")]
    assert to_svg(drawing).startswith("<svg ")
