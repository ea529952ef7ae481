from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.config_file import ParsedConfig, parse_config_leniently
from ovmstrio.config.specs import GraphSpec, TextModelSpec
from ovmstrio.config.text_entries import TEXT_OPTIONS
from ovmstrio.core.errors import Problem
from ovmstrio.core.generation import Task
from ovmstrio.encoding.messages import message_class
from ovmstrio.graphs.calculators.text import TEXT_CALCULATORS
from ovmstrio.server.command_line import read_settings, single_servable_spec
from ovmstrio.server.kinds import KINDS
from tests.support.graphs import llm_graph

_PASS_THROUGH = 'node { calculator: "PassThroughCalculator" input_stream: "output" output_stream: "more" }\n'
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
    [type.googleapis.com / mediapipe.{calculator}Options]: {{
      models_path: "model"
      {options}
    }}
  }}
}}
"""


def _other(calculator: str, side: str, options: str = "", *, prefix: str = "HTTP_") -> str:
    streams = {"request": f"{prefix}REQUEST_PAYLOAD", "response": f"{prefix}RESPONSE_PAYLOAD"}
    return _OTHER.format(calculator=calculator, side=side, options=options, **streams)


def _examine_graph(folder: Path, text: str, **lists: Any) -> ParsedConfig:
    (folder / "chat").mkdir(exist_ok=True)
    (folder / "chat" / "graph.pbtxt").write_text(text)
    content = lists or {"mediapipe_config_list": [{"name": "chat"}]}
    return parse_config_leniently(
        KINDS.values(), json.dumps({"model_config_list": [], **content}).encode(), folder / "config.json"
    )


def _read_model(folder: Path, text: str) -> TextModelSpec:
    (spec,) = _examine_graph(folder, text).spec.services
    assert isinstance(spec, TextModelSpec)
    return spec


def _problem(folder: Path, text: str) -> Problem:
    (problem,) = _read_model(folder, text).problems
    assert problem.file == str(folder / "chat" / "graph.pbtxt")
    return problem


def _line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_graph_written_by_ovms_is_a_text_model(tmp_path: Path) -> None:
    text = llm_graph(
        'plugin_config: \'{ "KV_CACHE_PRECISION": "u8"}\',',
        "enable_prefix_caching: true, cache_size: 8, max_num_seqs:64, max_tokens_limit: 4096,",
        'device: "GPU", tool_parser: "hermes3", pipeline_type: LM_CB',
    )
    examined = _examine_graph(tmp_path, text)
    (spec,) = examined.spec.services
    assert isinstance(spec, TextModelSpec)
    assert (spec.problems, examined.spec.problems, examined.fatal) == ((), (), ())
    assert (spec.name, spec.task, spec.path) == ("chat", Task.TEXT_GENERATION, tmp_path / "chat")
    assert (spec.device, spec.plugin_config) == ("GPU", {"KV_CACHE_PRECISION": "u8"})
    assert (spec.cache_size, spec.max_num_seqs, spec.max_tokens_limit) == (8, 64, 4096)
    assert (spec.tool_parser, spec.enable_prefix_caching) == ("hermes3", True)


def test_graph_in_the_list_of_models_is_a_text_model(tmp_path: Path) -> None:
    examined = _examine_graph(
        tmp_path, llm_graph(), model_config_list=[{"config": {"name": "llm", "base_path": "chat"}}]
    )
    (spec,) = examined.spec.services
    assert isinstance(spec, TextModelSpec)
    assert (spec.name, spec.path) == ("llm", tmp_path / "chat")


def test_graph_of_the_command_line_is_a_text_model(tmp_path: Path) -> None:
    _examine_graph(tmp_path, llm_graph("cache_size: 2"))
    settings = read_settings({"model_name": "llm", "model_path": str(tmp_path / "chat")})
    (spec,) = single_servable_spec(settings).services
    assert isinstance(spec, TextModelSpec)
    assert (spec.path, spec.cache_size) == (tmp_path / "chat", 2)


@pytest.mark.parametrize("prefix", ["HTTP_", ""])
def test_calculators_have_tasks_and_options(tmp_path: Path, prefix: str) -> None:
    options = 'normalize_embeddings: false pooling: LAST truncate: true target_device: "GPU"'
    graph = _other("EmbeddingsCalculatorOV", "EMBEDDINGS_NODE_RESOURCES", options, prefix=prefix)
    embeddings = _read_model(tmp_path, graph)
    assert (embeddings.problems, embeddings.task) == ((), Task.EMBEDDINGS)
    assert embeddings.path == tmp_path / "chat" / "model"
    assert (embeddings.normalize, embeddings.pooling, embeddings.truncate) == (False, "LAST", True)
    assert embeddings.device == "GPU"
    plain = _read_model(tmp_path, _other("EmbeddingsCalculatorOV", "EMBEDDINGS_NODE_RESOURCES", prefix=prefix))
    assert plain.pooling == "CLS"
    graph = _other("RerankCalculatorOV", "RERANK_NODE_RESOURCES", "max_allowed_chunks: 9", prefix=prefix)
    rerank = _read_model(tmp_path, graph)
    assert (rerank.problems, rerank.task, rerank.max_allowed_chunks) == ((), Task.RERANK, 9)
    speech = _read_model(tmp_path, _other("S2tCalculator", "STT_NODE_RESOURCES", prefix=prefix))
    assert (speech.problems, speech.task) == ((), Task.SPEECH_TO_TEXT)
    voice = _read_model(tmp_path, _other("T2sCalculator", "TTS_NODE_RESOURCES", prefix=prefix))
    assert (voice.problems, voice.task, voice.voices) == ((), Task.TEXT_TO_SPEECH, {})
    assert (voice.speed_min, voice.speed_max) == (0.25, 4.0)


def test_voices_and_speeds_of_a_graph(tmp_path: Path) -> None:
    voices = 'voices { name: "anna" path: "voices/anna.bin" } voices { name: "bob" path: "/bob.bin" }'
    graph = ("T2sCalculator", "TTS_NODE_RESOURCES")
    spec = _read_model(tmp_path, _other(*graph, f"{voices} speed_min: 0.5 speed_max: 2"))
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
        ("draft_cache_size: 1", "the draft model uses the settings of the main model"),
        ("draft_eagle3_mode: true", "needs draft_models_path"),
        ("pipeline_type: OMNI", "sound of requests and of answers is not supported"),
        ("cache_eviction_config { start_size: 1 recent_size: 1 max_cache_size: 9 }", "cache eviction is not supported"),
        ("sparse_attention_config { mode: XATTENTION }", "sparse attention is not supported"),
        ('generation_config_path: "x.json"', "place the file there"),
        ("max_num_seqs: 0", "expected an integer of 1 to 2147483647, found 0"),
        ("plugin_config: 'KV'", "JSON"),
        ("cache_size: many", "expected an integer"),
    ],
)
def test_unsupported_option_is_an_error_with_its_line(tmp_path: Path, option: str, words: str) -> None:
    text = llm_graph("enable_prefix_caching: true", option)
    problem = _problem(tmp_path, text)
    assert words in str(problem)
    assert problem.line == _line_of(text, option)


def test_limits_of_an_image_graph(tmp_path: Path) -> None:
    graph = ("ImageGenCalculator", "IMAGE_GEN_NODE_RESOURCES")
    plain = _read_model(tmp_path, _other(*graph))
    assert (plain.problems, plain.task, plain.max_resolution) == ((), Task.IMAGE_GENERATION, "4096x4096")
    options = (
        'device: "CPU GPU NPU", plugin_config: \'{ "NUM_STREAMS": "1" }\', resolution: "512x512", guidance_scale: 5.5, '
        'default_resolution: "512x512", max_num_images_per_prompt: 4, default_num_inference_steps: 20, '
        "max_num_inference_steps: 30, num_images_per_prompt: 2"
    )
    spec = _read_model(tmp_path, _other(*graph, options))
    assert (spec.problems, spec.device, spec.plugin_config) == ((), "CPU GPU NPU", {"NUM_STREAMS": "1"})
    assert (spec.resolution, spec.default_resolution) == ("512x512", "512x512")
    assert (spec.max_num_images_per_prompt, spec.num_images_per_prompt, spec.guidance_scale) == (4, 2, 5.5)
    assert (spec.default_num_inference_steps, spec.max_num_inference_steps) == (20, 30)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ('max_resolution: "wide"', "WIDTHxHEIGHT"),
        ('lora_adapters { alias: "a" path: "a.safetensors" mode: FUSE }', "an option of models for text_generation"),
        ('composite_lora_adapters { alias: "b" components { adapter_alias: "a" alpha: 0.5 } }', "LoRA adapters"),
    ],
)
def test_unsupported_option_of_an_image_graph_is_an_error_with_its_line(
    tmp_path: Path, option: str, words: str
) -> None:
    text = _other("ImageGenCalculator", "IMAGE_GEN_NODE_RESOURCES", option)
    problem = _problem(tmp_path, text)
    assert words in str(problem)
    assert problem.line == _line_of(text, option)


@pytest.mark.parametrize(
    ("written", "instead", "words"),
    [
        ('input_stream: "HTTP_REQUEST_PAYLOAD:input"\noutput', 'input_stream: "input"\noutput', "HTTP_REQUEST_PAYLOAD"),
        ('input_side_packet: "LLM_NODE_RESOURCES:llm"', 'input_side_packet: "LLM:llm"', "LLM_NODE_RESOURCES"),
        ('  output_stream: "HTTP_RESPONSE_PAYLOAD:output"', '  output_stream: "OUT:output"', "HTTP_RESPONSE_PAYLOAD"),
        ('  input_stream: "HTTP_REQUEST_PAYLOAD:input"\n', "", "needs exactly one input stream"),
        ("back_edge: true", "back_edge: false", "cycle"),
        ("HttpLLMCalculator", "RerankCalculatorOV", "RERANK_NODE_RESOURCES"),
    ],
)
def test_node_with_other_streams_is_refused(tmp_path: Path, written: str, instead: str, words: str) -> None:
    text = llm_graph()
    assert written in text
    problems = _read_model(tmp_path, text.replace(written, instead, 1)).problems
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
def test_every_unsupported_option_of_ovms_is_an_error(tmp_path: Path, calculator: str, option: str) -> None:
    values = {"cache_eviction_config": "{ start_size: 1 recent_size: 1 max_cache_size: 3 }"}
    message = message_class(TEXT_CALCULATORS[calculator].options).DESCRIPTOR.fields_by_name[option]
    kinds = {"bool": "true", "string": '"1"', "message": "{}"}
    name = "bool" if message.type == message.TYPE_BOOL else "string" if message.type == message.TYPE_STRING else ""
    value = values.get(option) or kinds.get("message" if message.message_type is not None else name, "1")
    side = TEXT_CALCULATORS[calculator].resources[0]
    text = _other(calculator, side, f"{option}: {value}")
    (spec,) = _examine_graph(tmp_path, text).spec.services
    errors = [problem for problem in spec.problems if problem.severity == "error"]
    assert errors
    assert all(problem.suggestion for problem in errors)


def test_node_without_options_is_an_error(tmp_path: Path) -> None:
    text = llm_graph().partition("  node_options: {")[0] + "}\n"
    assert "has no options with a models_path" in _problem(tmp_path, text).message


def test_only_language_models_have_other_nodes(tmp_path: Path) -> None:
    (language,) = _examine_graph(tmp_path, llm_graph() + _PASS_THROUGH).spec.services
    assert [each for each in KINDS[language.kind].examine(language) if each.severity == "error"] == []
    text = _other("RerankCalculatorOV", "RERANK_NODE_RESOURCES") + _PASS_THROUGH
    (spec,) = _examine_graph(tmp_path, text).spec.services
    assert isinstance(spec, GraphSpec)
    problems = KINDS[spec.kind].examine(spec)
    (problem,) = [each for each in problems if each.severity == "error"]
    assert 'node "node": a RerankCalculatorOV must be the only node of its graph' in problem.message
    assert problem.line == _line_of(text, "node {")


def test_change_of_model_files_is_a_change_of_the_graph(tmp_path: Path) -> None:
    (spec,) = _examine_graph(tmp_path, llm_graph('draft_models_path: "small"') + _PASS_THROUGH).spec.services
    kind, folder = KINDS[spec.kind], tmp_path / "chat"
    marks = [kind.fingerprint(spec, folder)]
    for name in ("openvino_model.bin", "small/openvino_model.xml", "chat_template.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("changed")
        marks.append(kind.fingerprint(spec, folder))
    assert len(set(marks)) == 4
    (folder / "notes.log").write_text("written by a node")
    assert kind.fingerprint(spec, folder) == marks[-1]


@pytest.mark.parametrize("name", ["x" * 300, "a\\000b", "file"])
def test_unreadable_model_folder_has_a_version(tmp_path: Path, name: str) -> None:
    (spec,) = _examine_graph(tmp_path, llm_graph(f'draft_models_path: "{name}"') + _PASS_THROUGH).spec.services
    (tmp_path / "chat" / "file").write_text("no folder")
    marks = KINDS[spec.kind].list_versions(spec)
    assert list(marks.versions) == [1]
    (tmp_path / "chat" / "file").unlink()
    assert (KINDS[spec.kind].list_versions(spec).fingerprint == marks.fingerprint) is (name != "file")


def test_graph_file_is_part_of_the_configuration(tmp_path: Path) -> None:
    examined = _examine_graph(tmp_path, llm_graph())
    assert examined.spec.dependencies[tmp_path / "chat" / "graph.pbtxt"] == llm_graph().encode()


def test_comment_does_not_make_a_graph_a_text_model(tmp_path: Path) -> None:
    text = """# not a HttpLLMCalculator
input_stream: "IN:in"
output_stream: "OUT:out"
node { calculator: "PassThroughCalculator" input_stream: "IN:in" output_stream: "IN:out" }
"""
    (spec,) = _examine_graph(tmp_path, text).spec.services
    assert isinstance(spec, GraphSpec)


def test_models_are_files_or_folders_relative_to_the_graph(tmp_path: Path) -> None:
    options = 'draft_models_path: "../small"', 'draft_device: "CPU"', "draft_eagle3_mode: false", 'tool_parser: ""'
    spec = _read_model(tmp_path, llm_graph(*options).replace('models_path: "./"', 'models_path: "SmolLM2.gguf"'))
    assert spec.problems == ()
    assert spec.path == tmp_path / "chat" / "SmolLM2.gguf"
    assert spec.draft_path is not None
    assert (spec.draft_path.resolve(), spec.draft_device) == ((spec.base_path / "../small").resolve(), "CPU")
