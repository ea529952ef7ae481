"""Graphs of OpenVINO Model Server that are one model of text: read unchanged, and served as that model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import Examined, examine_config
from ovmstrio.config.specs import GraphSpec
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.config.text_options import TEXT_OPTIONS
from ovmstrio.core.errors import Problem
from ovmstrio.core.generation import Task
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.calculators.text_models import TEXT_CALCULATORS
from ovmstrio.runtimes.table import KINDS
from ovmstrio.server.command_line import read_settings, single_servable

_LLM = """\
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"

node: {
  name: "LLMExecutor"
  calculator: "HttpLLMCalculator"
  input_stream: "LOOPBACK:loopback"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  input_side_packet: "LLM_NODE_RESOURCES:llm"
  output_stream: "LOOPBACK:loopback"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  input_stream_info: {
    tag_index: 'LOOPBACK:0',
    back_edge: true
  }
  node_options: {
      [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {
          models_path: "./",
          OPTIONS
      }
  }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler",
    options {
      [mediapipe.SyncSetInputStreamHandlerOptions.ext] {
        sync_set {
          tag_index: "LOOPBACK:0"
        }
      }
    }
  }
}
"""
_OTHER = """\
input_stream: "{request}:input"
output_stream: "{response}:output"
node {{
  name: "node"
  calculator: "{calculator}"
  input_side_packet: "{side}:resources"
  input_stream: "{request}:input"
  output_stream: "{response}:output"
  node_options: {{
    [type.googleapis.com / mediapipe.{message}]: {{
      models_path: "model"
      {options}
    }}
  }}
}}
"""


def _llm(*options: str) -> str:
    return _LLM.replace("OPTIONS", "\n          ".join(options))


def _other(calculator: str, message: str, side: str, options: str = "", *, prefix: str = "HTTP_") -> str:
    streams = {"request": f"{prefix}REQUEST_PAYLOAD", "response": f"{prefix}RESPONSE_PAYLOAD"}
    return _OTHER.format(calculator=calculator, message=message, side=side, options=options, **streams)


def _examine(folder: Path, text: str, **lists: Any) -> Examined:
    (folder / "chat").mkdir(exist_ok=True)
    (folder / "chat" / "graph.pbtxt").write_text(text)
    content = lists or {"mediapipe_config_list": [{"name": "chat"}]}
    return examine_config(
        KINDS.values(), json.dumps({"model_config_list": [], **content}).encode(), folder / "config.json"
    )


def _only(folder: Path, text: str) -> TextModelSpec:
    (spec,) = _examine(folder, text).spec.services
    assert isinstance(spec, TextModelSpec)
    return spec


def _problem(folder: Path, text: str) -> Problem:
    (problem,) = _only(folder, text).problems
    assert problem.file == str(folder / "chat" / "graph.pbtxt")
    return problem


def _line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_graph_that_ovms_writes_is_a_model_that_makes_text(tmp_path: Path) -> None:
    """All its options are read, its path leads on from the graph's folder, and nothing is said of it."""
    examined = _examine(
        tmp_path,
        _llm(
            'plugin_config: \'{ "KV_CACHE_PRECISION": "u8"}\',',
            "enable_prefix_caching: true,",
            "cache_size: 8,",
            "max_num_seqs:64,",
            'device: "GPU",',
            'tool_parser: "hermes3",',
            "pipeline_type: LM_CB,",
            "max_tokens_limit: 4096",
        ),
    )
    (spec,) = examined.spec.services
    assert isinstance(spec, TextModelSpec)
    assert (spec.problems, examined.spec.problems, examined.fatal) == ((), (), ())
    assert (spec.name, spec.task, spec.path) == ("chat", Task.TEXT_GENERATION, tmp_path / "chat")
    assert (spec.device, spec.plugin_config) == ("GPU", {"KV_CACHE_PRECISION": "u8"})
    assert (spec.cache_size, spec.max_num_seqs, spec.max_tokens_limit) == (8, 64, 4096)
    assert (spec.tool_parser, spec.enable_prefix_caching) == ("hermes3", True)


def test_a_graph_among_the_models_is_one_too(tmp_path: Path) -> None:
    """The folder holds the graph's file."""
    examined = _examine(tmp_path, _llm(), model_config_list=[{"config": {"name": "llm", "base_path": "chat"}}])
    (spec,) = examined.spec.services
    assert isinstance(spec, TextModelSpec)
    assert (spec.name, spec.path) == ("llm", tmp_path / "chat")


def test_a_graph_that_the_command_line_names_is_one_too(tmp_path: Path) -> None:
    """By its folder."""
    _examine(tmp_path, _llm("cache_size: 2"))
    settings = read_settings({"model_name": "llm", "model_path": str(tmp_path / "chat")})
    (spec,) = single_servable(settings).services
    assert isinstance(spec, TextModelSpec)
    assert (spec.path, spec.cache_size) == (tmp_path / "chat", 2)


def test_a_file_is_named_as_a_folder_is(tmp_path: Path) -> None:
    """Relative to the graph's folder."""
    text = _llm().replace('models_path: "./"', 'models_path: "SmolLM2.gguf"')
    assert _only(tmp_path, text).path == tmp_path / "chat" / "SmolLM2.gguf"


@pytest.mark.parametrize("prefix", ["HTTP_", ""])
def test_the_siblings_are_models_of_their_tasks(tmp_path: Path, prefix: str) -> None:
    """Their tags may have both forms, and options have the names of each calculator."""
    embeddings = _only(
        tmp_path,
        _other(
            "EmbeddingsCalculatorOV",
            "EmbeddingsCalculatorOVOptions",
            "EMBEDDINGS_NODE_RESOURCES",
            'normalize_embeddings: false pooling: LAST truncate: true target_device: "GPU"',
            prefix=prefix,
        ),
    )
    assert (embeddings.problems, embeddings.task) == ((), Task.EMBEDDINGS)
    assert embeddings.path == tmp_path / "chat" / "model"
    assert (embeddings.normalize, embeddings.pooling, embeddings.truncate) == (False, "LAST", True)
    assert embeddings.device == "GPU"
    rerank = _only(
        tmp_path,
        _other(
            "RerankCalculatorOV", "RerankCalculatorOVOptions", "RERANK_NODE_RESOURCES", "max_allowed_chunks: 9",
            prefix=prefix,
        ),
    )  # fmt: skip
    assert (rerank.problems, rerank.task, rerank.max_allowed_chunks) == ((), Task.RERANK, 9)
    speech = _only(tmp_path, _other("S2tCalculator", "S2tCalculatorOptions", "STT_NODE_RESOURCES", prefix=prefix))
    assert (speech.problems, speech.task) == ((), Task.SPEECH_TO_TEXT)
    voice = _only(tmp_path, _other("T2sCalculator", "T2sCalculatorOptions", "TTS_NODE_RESOURCES", prefix=prefix))
    assert (voice.problems, voice.task, voice.voices) == ((), Task.TEXT_TO_SPEECH, {})
    assert (voice.speed_min, voice.speed_max) == (0.25, 4.0)


def test_the_voices_of_a_graph_are_files_beside_it(tmp_path: Path) -> None:
    """Or wherever they are, and texts are spoken as fast as it says; a range without a speed is an error."""
    voices = 'voices { name: "anna" path: "voices/anna.bin" } voices { name: "bob" path: "/bob.bin" }'
    graph = ("T2sCalculator", "T2sCalculatorOptions", "TTS_NODE_RESOURCES")
    spec = _only(tmp_path, _other(*graph, f"{voices} speed_min: 0.5 speed_max: 2"))
    assert spec.problems == ()
    assert spec.voices == {"anna": tmp_path / "chat" / "voices/anna.bin", "bob": Path("/bob.bin")}
    assert (spec.speed_min, spec.speed_max) == (0.5, 2.0)

    text = _other(*graph, "speed_min: 3\n      speed_max: 2")
    problem = _problem(tmp_path, text)
    assert "speed_min (3) must be <= speed_max (2)" in str(problem)
    assert problem.line == _line_of(text, "speed_min")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("max_num_seq: 8", "did you mean 'max_num_seqs'?"),
        ("draft_cache_size: 1", "the model that drafts has the settings of the first"),
        ("draft_eagle3_mode: true", "models that draft by EAGLE-3 are not served"),
        ("pipeline_type: OMNI", "models that take images or sound"),
        ("pipeline_type: VLM_CB", "models that take images or sound"),
        ("cache_eviction_config { start_size: 1 recent_size: 1 max_cache_size: 9 }", "tokens are not evicted"),
        ("sparse_attention_config { mode: XATTENTION }", "attention is not thinned out"),
        ('generation_config_path: "x.json"', "put the file into that folder"),
        ("max_num_seqs: 0", "expected 1 or more, found 0"),
        ("plugin_config: 'KV'", "JSON"),
        ("cache_size: many", "expected a whole number"),
    ],
)
def test_what_is_not_served_is_an_error_on_its_line(tmp_path: Path, option: str, words: str) -> None:
    """Nothing is passed over in silence, and the way out is said."""
    text = _llm("enable_prefix_caching: true", option)
    problem = _problem(tmp_path, text)
    assert words in str(problem)
    assert problem.line == _line_of(text, option)


def test_a_model_of_images_is_refused(tmp_path: Path) -> None:
    """With the line of its node."""
    text = _other("ImageGenCalculator", "ImageGenCalculatorOptions", "IMAGE_GEN_NODE_RESOURCES")
    problem = _problem(tmp_path, text)
    assert "models that make images are not served" in problem.message
    assert problem.line == 3


def test_a_draft_stands_where_the_file_says(tmp_path: Path) -> None:
    """Relative to the graph's folder, as the model itself."""
    spec = _only(tmp_path, _llm('draft_models_path: "../small"', 'draft_device: "CPU"'))
    assert spec.problems == ()
    assert spec.draft_path is not None
    assert (spec.draft_path.resolve(), spec.draft_device) == ((spec.base_path / "../small").resolve(), "CPU")


def test_what_is_switched_off_is_not_asked_for(tmp_path: Path) -> None:
    """Files that are written by programs hold such options."""
    assert _only(tmp_path, _llm("draft_eagle3_mode: false", 'tool_parser: ""')).problems == ()


@pytest.mark.parametrize(
    ("written", "instead", "words"),
    [
        ('input_stream: "HTTP_REQUEST_PAYLOAD:input"\noutput', 'input_stream: "input"\noutput', "HTTP_REQUEST_PAYLOAD"),
        ('input_side_packet: "LLM_NODE_RESOURCES:llm"', 'input_side_packet: "LLM:llm"', "LLM_NODE_RESOURCES"),
        ('  output_stream: "HTTP_RESPONSE_PAYLOAD:output"', '  output_stream: "OUT:output"', "HTTP_RESPONSE_PAYLOAD"),
        ('  input_stream: "HTTP_REQUEST_PAYLOAD:input"\n', "", "has one input stream"),
        ("back_edge: true", "back_edge: false", "cycle"),
        ("HttpLLMCalculator", "RerankCalculatorOV", "RERANK_NODE_RESOURCES"),
    ],
)
def test_a_node_that_is_wired_otherwise_is_refused(tmp_path: Path, written: str, instead: str, words: str) -> None:
    """The streams, side packets and the loop are those that OVMS writes."""
    text = _llm()
    assert written in text
    problems = _only(tmp_path, text.replace(written, instead, 1)).problems
    assert any(words in str(problem) for problem in problems)


def _unread_options() -> set[tuple[str, str]]:
    served = {"target_device": "device", "normalize": "normalize_embeddings"}
    unread = set()
    for calculator in TEXT_CALCULATORS.values():
        known = {served.get(option, option) for option in TEXT_OPTIONS} | {"device", "target_device", "models_path"}
        fields = message_class(calculator.options).DESCRIPTOR.fields
        unread |= {(calculator.name, field.name) for field in fields if field.name not in known}
    return unread


@pytest.mark.parametrize(("calculator", "option"), sorted(_unread_options()))
def test_an_option_that_is_not_served_is_never_passed_over(tmp_path: Path, calculator: str, option: str) -> None:
    """All that OVMS's messages have and this server has not is refused with the way out, or the whole calculator is."""
    values = {"cache_eviction_config": "{ start_size: 1 recent_size: 1 max_cache_size: 3 }"}
    message = message_class(TEXT_CALCULATORS[calculator].options).DESCRIPTOR.fields_by_name[option]
    kinds = {"bool": "true", "string": '"1"', "message": "{}"}
    name = "bool" if message.type == message.TYPE_BOOL else "string" if message.type == message.TYPE_STRING else ""
    value = values.get(option) or kinds.get("message" if message.message_type is not None else name, "1")
    side = TEXT_CALCULATORS[calculator].resources[0]
    text = _other(calculator, TEXT_CALCULATORS[calculator].message, side, f"{option}: {value}")
    (spec,) = _examine(tmp_path, text).spec.services
    told = [problem for problem in spec.problems if problem.severity == "error"]
    assert told
    assert all(problem.suggestion for problem in told)


def test_a_node_without_options_is_told_of_them(tmp_path: Path) -> None:
    """They name the model."""
    begin, _, rest = _llm().partition("  node_options: {")
    text = begin + rest.partition("      }\n  }\n")[2]
    assert "has no options that name its models_path" in _problem(tmp_path, text).message


def test_a_node_that_makes_no_text_is_refused_beside_others_on_its_line(tmp_path: Path) -> None:
    """The graph stays one, and does not load; a node that makes text may have company."""
    other = 'node { calculator: "PassThroughCalculator" input_stream: "output" output_stream: "more" }\n'
    (beside,) = _examine(tmp_path, _llm() + other).spec.services
    assert [each for each in KINDS[beside.kind].examine(beside) if each.severity == "error"] == []
    text = _other("RerankCalculatorOV", "RerankCalculatorOVOptions", "RERANK_NODE_RESOURCES") + other
    (spec,) = _examine(tmp_path, text).spec.services
    assert isinstance(spec, GraphSpec)
    problems = KINDS[spec.kind].examine(spec)
    (problem,) = [each for each in problems if each.severity == "error"]
    assert 'node "node": a RerankCalculatorOV is served as the only node of its graph' in problem.message
    assert problem.line == _line_of(text, "node {")


def test_a_graph_is_another_one_when_the_model_of_a_node_is(tmp_path: Path) -> None:
    """Not when code of users leaves files beside it."""
    other = 'node { calculator: "PassThroughCalculator" input_stream: "output" output_stream: "more" }\n'
    (spec,) = _examine(tmp_path, _llm('draft_models_path: "small"') + other).spec.services
    kind, folder = KINDS[spec.kind], tmp_path / "chat"
    marks = [kind.files_mark(spec, folder)]
    for name in ("openvino_model.bin", "small/openvino_model.xml", "chat_template.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("changed")
        marks.append(kind.files_mark(spec, folder))
    assert len(set(marks)) == 4
    (folder / "notes.log").write_text("written by a node")
    assert kind.files_mark(spec, folder) == marks[-1]


@pytest.mark.parametrize("name", ["x" * 300, "a\\000b", "file"])
def test_a_model_that_cannot_be_looked_at_is_a_state_like_any_other(tmp_path: Path, name: str) -> None:
    """Whoever looks for changes goes on; the graph says why it cannot be loaded."""
    other = 'node { calculator: "PassThroughCalculator" input_stream: "output" output_stream: "more" }\n'
    (spec,) = _examine(tmp_path, _llm(f'draft_models_path: "{name}"') + other).spec.services
    (tmp_path / "chat" / "file").write_text("no folder")
    marks = KINDS[spec.kind].list_versions(spec)
    assert list(marks.versions) == [1]
    (tmp_path / "chat" / "file").unlink()
    assert (KINDS[spec.kind].list_versions(spec).mark == marks.mark) is (name != "file")


def test_a_change_of_the_graph_is_a_change_of_the_configuration(tmp_path: Path) -> None:
    """It is known what was read, and so the configuration is read again when that has changed."""
    examined = _examine(tmp_path, _llm())
    assert examined.spec.further_files[tmp_path / "chat" / "graph.pbtxt"] == _llm().encode()


def test_graphs_of_python_code_stay_graphs(tmp_path: Path) -> None:
    """Also where a comment names such a calculator."""
    text = """# not a HttpLLMCalculator
input_stream: "IN:in"
output_stream: "OUT:out"
node { calculator: "PassThroughCalculator" input_stream: "IN:in" output_stream: "IN:out" }
"""
    (spec,) = _examine(tmp_path, text).spec.services
    assert isinstance(spec, GraphSpec)
