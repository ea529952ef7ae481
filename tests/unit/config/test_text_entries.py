"""Models of text in ``config.json``: their form, their options and what they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import examine_config, parse_config
from ovmstrio.config.specs import ServerSpec
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.table import KINDS

_FILE = Path("/etc/ovms/config.json")
_CHAT = {"name": "chat", "base_path": "models/chat"}


def _parse(*models: Any, **lists: Any) -> ServerSpec:
    content = {"model_config_list": [], **lists, "text_model_config_list": [{"config": each} for each in models]}
    return parse_config(KINDS.values(), json.dumps(content, indent=1).encode(), _FILE)


def _only(**options: Any) -> TextModelSpec:
    (spec,) = _parse({**_CHAT, **options}).of(TextModelSpec)
    return spec


def _problem(**options: Any) -> Problem:
    (problem,) = _only(**options).problems
    assert problem.file == str(_FILE)
    assert problem.line is not None
    return problem


def test_a_model_is_a_folder_or_a_file_and_makes_text_unless_it_says_otherwise() -> None:
    """Relative paths lead on from the configuration's folder."""
    folder, file = _parse(_CHAT, {"name": "e", "base_path": "/m/e.gguf", "task": "embeddings"}).of(TextModelSpec)
    assert (folder.path, folder.task, folder.problems) == (Path("/etc/ovms/models/chat"), Task.TEXT_GENERATION, ())
    assert (file.path, file.base_path, file.task) == (Path("/m/e.gguf"), Path("/m"), Task.EMBEDDINGS)


def test_options_become_fields_of_the_model() -> None:
    """Those of the device have the names that they have for other models."""
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


def test_voices_are_files_by_names_and_speeds_bound_requests() -> None:
    """Relative paths lead on from the configuration's folder."""
    speech = {"task": "text2speech"}
    spec = _only(**speech, voices={"anna": "voices/anna.bin"}, speed_min=0.5, speed_max=2, idle_unload_seconds=9)
    assert spec.problems == ()
    assert spec.voices == {"anna": Path("/etc/ovms/voices/anna.bin")}
    assert (spec.speed_min, spec.speed_max, spec.idle_unload_seconds) == (0.5, 2, 9)
    assert "expected an object such as" in str(_problem(**speech, voices={"anna": 5}))
    assert "speed_min (0.25) must be <= speed_max (0.1)" in str(_problem(**speech, speed_max=0.1))
    assert "models for text2speech" in str(_problem(voices={"anna": "anna.bin"}))


def test_what_is_said_by_default_of_caching_and_of_the_queue() -> None:
    """Prefixes are computed once, and calls wait in the model, also where any number may be under way."""
    spec = _parse({**_CHAT, "max_queue": 3})
    (model,) = spec.of(TextModelSpec)
    assert model.enable_prefix_caching
    assert model.max_queue == 3
    assert spec.problems == ()


@pytest.mark.parametrize(
    ("options", "key", "words"),
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
def test_a_value_that_cannot_be_used_stays_with_the_model(options: dict[str, Any], key: str, words: str) -> None:
    """It is known by name, fails to load with the place of the option, and everything else is served."""
    problem = _problem(**options)
    assert problem.path == f"text_model_config_list[0].config.{key}"
    assert words in str(problem)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """One problem does not hide another."""
    paths = [problem.path for problem in _only(max_num_seqs=0, best_of_limit=0, pooling="CLS").problems]
    assert [path.rpartition(".")[2] for path in paths] == ["pooling", "max_num_seqs", "best_of_limit"]


def test_an_unknown_key_makes_the_file_unusable_with_a_hint() -> None:
    """As in any other list."""
    with pytest.raises(ConfigError, match=r"unknown key 'cache_sise'; did you mean 'cache_size'\?"):
        _only(cache_sise=4)


def test_a_wrong_type_makes_the_file_unusable() -> None:
    """As in any other list."""
    with pytest.raises(ConfigError, match=r"max_num_seqs: wrong type or value \(expected an integer, found \"8\"\)"):
        _only(max_num_seqs="8")


_OTHERWISE: dict[str, Any] = {
    "kind": "other", "name": "other", "base_path": Path("/other"), "path": Path("/other"), "task": Task.RERANK,
    "device": "GPU", "plugin_config": {"A": 1}, "cache_dir": Path("/cache"), "max_num_batched_tokens": 7,
    "cache_size": 7, "max_num_seqs": 7, "dynamic_split_fuse": False, "enable_prefix_caching": False, "best_of_limit": 7,
    "max_tokens_limit": 7, "tool_parser": "none", "reasoning_parser": "none", "enable_tool_guided_generation": True,
    "chat_template_mode": "MINJA", "pooling": "MEAN", "normalize": False, "truncate": True, "max_allowed_chunks": 7,
    "enable_word_timestamps": True, "voices": {"a": Path("/a")}, "speed_min": 0.5, "speed_max": 2.0, "max_queue": 7,
    "kv_overcommit": 2.0, "draft_path": Path("/draft"), "draft_device": "GPU", "reload": "swap",
    "idle_unload_seconds": 7.0, "load_number": 7,
}  # fmt: skip
_NOT_LOADED = {"version_policy", "origin", "place", "problems", "max_concurrency", "placement"}
"""What the registry, admission and readers look up when they need it."""


@pytest.mark.parametrize("field", sorted(TextModelSpec.model_fields.keys() - _NOT_LOADED))
def test_every_setting_of_a_model_that_changes_has_it_loaded_anew(field: str) -> None:
    """How many may wait is its engine's to know, too."""
    spec = _only()
    other = spec.model_copy(update={field: _OTHERWISE[field]})
    assert spec.needs_reload(other)
    assert not spec.needs_reload(spec.model_copy())


@pytest.mark.parametrize("field", ["max_concurrency", "origin"])
def test_what_is_asked_for_at_each_call_has_nothing_loaded_anew(field: str) -> None:
    """A limit of calls holds at once."""
    spec = _only()
    assert not spec.needs_reload(spec.model_copy(update={field: {"max_concurrency": 7, "origin": "x"}[field]}))


@pytest.mark.parametrize("where", ["mediapipe_config_list", "text_model_config_list"])
def test_the_room_for_those_that_wait_is_read_of_each_list(tmp_path: Path, where: str) -> None:
    """A graph's entry has it as an entry of ours."""
    options = '{ [type.googleapis.com/mediapipe.LLMCalculatorOptions]: { models_path: "./" } }'
    streams = 'input_stream: "HTTP_REQUEST_PAYLOAD:input" output_stream: "HTTP_RESPONSE_PAYLOAD:output"'
    node = f'node {{ calculator: "HttpLLMCalculator" {streams} node_options: {options} }}'
    (tmp_path / "graph.pbtxt").write_text(f"{streams}\n{node}\n")
    entry: Any = {"name": "chat", "base_path": str(tmp_path), "max_queue": 3}
    content = {"model_config_list": [], where: [entry if where.startswith("mediapipe") else {"config": entry}]}
    spec = parse_config(KINDS.values(), json.dumps(content).encode(), tmp_path / "config.json")
    (model,) = spec.of(TextModelSpec)
    assert model.max_queue == 3


def test_a_name_of_another_kind_is_taken() -> None:
    """The model of tensors has it, and the text model is not served."""
    content = {
        "model_config_list": [{"config": {"name": "chat", "base_path": "/m"}}],
        "text_model_config_list": [{"config": _CHAT}],
    }
    spec = examine_config(KINDS.values(), json.dumps(content).encode(), _FILE).spec
    assert [service.kind for service in spec.services] == ["model"]
    assert "Text model has a name that is taken" in str(spec.problems[0])
