from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import ServerSpec
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from tests.support.config_documents import CONFIG_FILE, parse_sections

_CHAT = {"name": "chat", "base_path": "models/chat"}


def _parse(*models: Any) -> ServerSpec:
    return parse_sections(text_model_config_list=[{"config": each} for each in models])


def _only(**options: Any) -> TextModelSpec:
    (spec,) = _parse({**_CHAT, **options}).of(TextModelSpec)
    return spec


def _problem(**options: Any) -> Problem:
    (problem,) = _only(**options).problems
    assert problem.file == str(CONFIG_FILE)
    assert problem.line is not None
    return problem


def test_a_model_is_a_folder_or_a_file_with_the_task_text_generation_by_default() -> None:
    folder, file = _parse(_CHAT, {"name": "e", "base_path": "/m/e.gguf", "task": "embeddings"}).of(TextModelSpec)
    assert (folder.path, folder.task, folder.problems) == (Path("/etc/ovms/models/chat"), Task.TEXT_GENERATION, ())
    assert (file.path, file.base_path, file.task) == (Path("/m/e.gguf"), Path("/m"), Task.EMBEDDINGS)


def test_options_become_fields_of_the_model() -> None:
    spec = _only(
        target_device="GPU",
        plugin_config={"prompt_lookup": True},
        kv_cache_precision="u8",
        cache_size=4,
        max_num_seqs=8,
        enable_prefix_caching=False,
        tool_parser="hermes3",
        idle_unload_seconds=300,
        pipeline_type="LM_CB",
    )
    assert spec.problems == ()
    assert spec.device == "GPU"
    assert spec.plugin_config == {"prompt_lookup": True, "KV_CACHE_PRECISION": "u8"}
    assert (spec.cache_size, spec.max_num_seqs, spec.enable_prefix_caching) == (4, 8, False)
    assert (spec.tool_parser, spec.idle_unload_seconds) == ("hermes3", 300)


def test_voices_and_speeds_of_speech_models() -> None:
    speech = {"task": "text2speech"}
    spec = _only(**speech, voices={"anna": "voices/anna.bin"}, speed_min=0.5, speed_max=2, idle_unload_seconds=9)
    assert spec.problems == ()
    assert spec.voices == {"anna": Path("/etc/ovms/voices/anna.bin")}
    assert (spec.speed_min, spec.speed_max, spec.idle_unload_seconds) == (0.5, 2, 9)
    assert "expected an object such as" in str(_problem(**speech, voices={"anna": 5}))
    assert "speed_min (0.25) must be <= speed_max (0.1)" in str(_problem(**speech, speed_max=0.1))
    assert "models for text2speech" in str(_problem(voices={"anna": "anna.bin"}))


def test_prefix_caching_is_on_and_a_queue_limit_needs_no_concurrency_limit() -> None:
    spec = _parse({**_CHAT, "max_queue": 3})
    (model,) = spec.of(TextModelSpec)
    assert model.enable_prefix_caching
    assert model.max_queue == 3
    assert spec.problems == ()


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"task": "embedings"}, "task", "did you mean 'embeddings'?"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1 or more"),
        ({"cache_size": -1}, "cache_size", "0 or more"),
        ({"pooling": "CLS"}, "pooling", "is an option of models for embeddings"),
        ({"task": "embeddings", "pooling": "mean"}, "pooling", "did you mean 'MEAN'?"),
        ({"task": "rerank", "cache_size": 4}, "cache_size", "is an option of models for text_generation"),
        (
            {"task": "embeddings", "idle_unload_seconds": 9},
            "idle_unload_seconds",
            "of models for speech2text, text2speech, text_generation",
        ),
        ({"pipeline_type": "VLM"}, "pipeline_type", "images or sound"),
        ({"pipeline_type": "LMCB"}, "pipeline_type", "did you mean 'LM_CB'?"),
        ({"plugin_config": {"A": [1]}}, "plugin_config.A", "a text, a number, true or false"),
        ({"chat_template_mode": "jinja"}, "chat_template_mode", "did you mean 'JINJA'?"),
        ({"name": ""}, "name", "the name is empty"),
        ({"base_path": "gs://bucket/m"}, "base_path", "remote storage"),
    ],
)
def test_an_unusable_value_fails_only_its_model(options: dict[str, Any], key: str, message: str) -> None:
    problem = _problem(**options)
    assert problem.path == f"text_model_config_list[0].config.{key}"
    assert message in str(problem)


def test_all_problems_of_a_model_are_reported() -> None:
    paths = [problem.path for problem in _only(max_num_seqs=0, best_of_limit=0, pooling="CLS").problems]
    assert [path.rpartition(".")[2] for path in paths] == ["pooling", "max_num_seqs", "best_of_limit"]


_CHANGED: dict[str, Any] = {
    "kind": "other", "name": "other", "base_path": Path("/other"), "path": Path("/other"), "task": Task.RERANK,
    "device": "GPU", "plugin_config": {"A": 1}, "cache_dir": Path("/cache"), "max_num_batched_tokens": 7,
    "cache_size": 7, "max_num_seqs": 7, "dynamic_split_fuse": False, "enable_prefix_caching": False, "best_of_limit": 7,
    "max_tokens_limit": 7, "tool_parser": "none", "reasoning_parser": "none", "enable_tool_guided_generation": True,
    "chat_template_mode": "MINJA", "pooling": "MEAN", "normalize": False, "truncate": True, "max_allowed_chunks": 7,
    "enable_word_timestamps": True, "voices": {"a": Path("/a")}, "speed_min": 0.5, "speed_max": 2.0, "max_queue": 7,
    "kv_overcommit": 2.0, "draft_path": Path("/draft"), "draft_device": "GPU", "reload": "swap",
    "idle_unload_seconds": 7.0, "load_number": 7,
}  # fmt: skip
# The registry and admission look these up at each call.
_NOT_LOADED = {"version_policy", "origin", "place", "problems", "max_concurrency", "placement"}


@pytest.mark.parametrize("field", sorted(TextModelSpec.model_fields.keys() - _NOT_LOADED))
def test_a_changed_setting_needs_a_reload(field: str) -> None:
    spec = _only()
    other = spec.model_copy(update={field: _CHANGED[field]})
    assert spec.needs_reload(other)
    assert not spec.needs_reload(spec.model_copy())


@pytest.mark.parametrize("field", ["max_concurrency", "origin"])
def test_settings_that_apply_per_call_need_no_reload(field: str) -> None:
    spec = _only()
    assert not spec.needs_reload(spec.model_copy(update={field: {"max_concurrency": 7, "origin": "x"}[field]}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"cache_sise": 4}, r"unknown key 'cache_sise'; did you mean 'cache_size'\?"),
        ({"max_num_seqs": "8"}, r"max_num_seqs: wrong type or value \(expected an integer, found \"8\"\)"),
    ],
)
def test_a_wrong_form_makes_the_file_unusable(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _only(**option)


@pytest.mark.parametrize("section", ["mediapipe_config_list", "text_model_config_list"])
def test_the_queue_limit_is_read_from_both_lists(tmp_path: Path, section: str) -> None:
    options = '{ [type.googleapis.com/mediapipe.LLMCalculatorOptions]: { models_path: "./" } }'
    streams = 'input_stream: "HTTP_REQUEST_PAYLOAD:input" output_stream: "HTTP_RESPONSE_PAYLOAD:output"'
    node = f'node {{ calculator: "HttpLLMCalculator" {streams} node_options: {options} }}'
    (tmp_path / "graph.pbtxt").write_text(f"{streams}\n{node}\n")
    entry: Any = {"name": "chat", "base_path": str(tmp_path), "max_queue": 3}
    sections = {section: [entry if section.startswith("mediapipe") else {"config": entry}]}
    (model,) = parse_sections(tmp_path / "config.json", **sections).of(TextModelSpec)
    assert model.max_queue == 3
