from __future__ import annotations

import pytest

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import InvalidSyntax, Located
from ovmstrio.config.proto_fields import fit_message, parse_proto
from ovmstrio.protocol.descriptors import POOL

_GRAPH = POOL.FindMessageTypeByName("mediapipe.CalculatorGraphConfig")
_OPTIONS = POOL.FindMessageTypeByName("mediapipe.CalculatorOptions")


def _fit(text: str) -> tuple[Located, str, Findings]:
    findings = Findings("F")
    root, left = fit_message(text, parse_proto(text), _GRAPH, findings, refusal="no graph", options=_OPTIONS)
    return root, left, findings


def test_a_message_is_located_as_json_is() -> None:
    """Messages are dictionaries, repeated fields are lists, and each value has its line and path."""
    root, _, findings = _fit('node {\n  name: "a"\n  input_stream: "x"\n}\nnode: [\n{ input_stream: ["y", "z"] }]\n')
    first, second = root.items("node")
    assert (first.line, first.path, first.find("name").line, first.find("name").path) == (
        1,
        "node[0]",
        2,
        "node[0].name",
    )
    assert (second.line, [each.path for each in second.items("input_stream")]) == (
        6,
        ["node[1].input_stream[0]", "node[1].input_stream[1]"],
    )
    assert root.items("executor") == []
    assert not findings.all


def test_what_does_not_fit_is_blank_in_the_text() -> None:
    """The rest keeps its lines, and a place in a list counts those that are left out."""
    root, left, findings = _fit('node {\n  name: 4\n}\nnode { calculator: "c"\n nmae: "b" }\n')
    assert left.split() == ["node", "{", "}", "node", "{", "calculator:", '"c"', "}"]
    assert left.count("\n") == 5
    assert [(problem.line, problem.path) for problem in findings.all] == [(2, "node[0].name"), (5, "node[1].nmae")]
    assert all(problem.message.startswith("no graph - ") for problem in findings.all)
    assert [node.path for node in root.items("node")] == ["node[0]", "node[1]"]


@pytest.mark.parametrize("text", ["node {", "a = 1", "[x", 'a: "', "}"])
def test_a_text_that_cannot_be_read_ends_there(text: str) -> None:
    """With the line."""
    with pytest.raises(InvalidSyntax) as caught:
        parse_proto(text)
    assert caught.value.line == 1
