"""The reference of ``config.json`` and its JSON schema: complete, true, and as the server reads the file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ovmstrio.cli.config_reference import KEYS, json_schema, reference, schema_text
from ovmstrio.config.config_file import parse_config_leniently
from ovmstrio.core.errors import Problem
from ovmstrio.server.kinds import KINDS

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()
LISTS = sorted(key for key in SCHEMA["properties"] if key.endswith("_list"))


def _is_valid(config: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(config))


def _errors(config: Any, folder: Path) -> list[Problem]:
    content = json.dumps(config).encode()
    parsed = parse_config_leniently(KINDS.values(), content, folder / "config.json")
    own = (problem for service in parsed.spec.services for problem in service.problems)
    return [each for each in (*parsed.fatal, *parsed.spec.problems, *own) if each.severity == "error"]


def test_the_reference_and_the_schema_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config_keys.md").read_text(encoding="utf-8") == reference(), "run `just docs`"
    assert (ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8") == schema_text(), "run `just docs`"


def test_the_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_description_belongs_to_a_key() -> None:
    shown = set(re.findall(r"^\| `([^`]+)` \|", reference(), re.MULTILINE))
    paths = {key.partition(".")[2] if key.partition(".")[0] in LISTS else key for key in KEYS}
    assert paths == shown


def _entry(section: str) -> dict[str, Any]:
    """Return the smallest entry of a list."""
    source = {"node_name": "request", "data_item": "image"}
    node = {
        "name": "first", "type": "DL model", "model_name": "resnet", "inputs": [{"x": source}],
        "outputs": [{"data_item": "probabilities", "alias": "out"}],
    }  # fmt: skip
    further: dict[str, dict[str, Any]] = {
        "pipeline_config_list": {
            "inputs": ["image"],
            "nodes": [node],
            "outputs": [{"label": {"node_name": "first", "data_item": "out"}}],
        },
        "handler_config_list": {"path": "projects/iris"},
        "op_pipeline_config_list": {"path": "ops/ocr"},
        "mediapipe_config_list": {},
    }
    return {"name": "resnet", **further.get(section, {"base_path": "models/resnet"})}


_STATEFUL = ("idle_sequence_cleanup", "low_latency_transformation", "max_sequence_number", "sequence_migration")
_WITH: dict[str, dict[str, Any]] = {
    **{key: {"layout": "NHWC:NCHW"} for key in ("mean", "scale", "precision", "color_format")},
    **{key: {"stateful": True} for key in _STATEFUL},
    "max_allowed_chunks": {"task": "rerank"},
    "num_assistant_tokens": {"prompt_lookup": True},
    "draft_eagle3_mode": {"draft_models_path": "models/draft"},
    "enable_word_timestamps": {"task": "speech2text"},
    **{
        key: {"task": "embeddings"} for key in ("pooling", "normalize", "default_prompt_name", "truncate", "max_inputs")
    },
    **{key: {"task": "text2speech"} for key in ("voices", "speed_min", "speed_max")},
    **{
        key: {"task": "image_generation", "resolution": "512x512"}
        for key in ("max_resolution", "default_resolution", "max_num_images_per_prompt", "default_num_inference_steps")
    },
    **{
        key: {"task": "image_generation", "resolution": "512x512"}
        for key in ("max_num_inference_steps", "resolution", "num_images_per_prompt", "guidance_scale")
    },
}
"""Keys that other keys need."""


def _examples() -> Iterator[tuple[str, bool, str, Any]]:
    for section in LISTS:
        body = SCHEMA["properties"][section]["items"]
        is_wrapped = "config" in body.get("properties", {})
        body = body["properties"]["config"] if is_wrapped else body
        for part in (body.get("then"), body.get("else"), body):
            for key, each in (part or {}).get("properties", {}).items():
                for example in each.get("examples", ()):
                    yield section, is_wrapped, key, (part is body.get("then"), example)


@pytest.mark.parametrize(
    ("section", "is_wrapped", "key", "value"), list(_examples()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_every_example_is_read_without_an_error(
    section: str, is_wrapped: bool, key: str, value: Any, tmp_path: Path
) -> None:
    is_remote, example = value
    entry = {"name": "resnet", "remote": "grpc://gpu-1:9000"} if is_remote else _entry(section)
    entry |= {**_WITH.get(key, {}), key: example}
    config: dict[str, Any] = {"model_config_list": []} | {section: [{"config": entry} if is_wrapped else entry]}
    assert _is_valid(config), config
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch(mode=0o755)
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "vote.py").touch()
    assert _errors(config, tmp_path) == []


WRONG = {
    "unknown key of the file": {"model_config_list": [], "models": []},
    "no list": {},
    "unknown key": {"model_config_list": [{"config": {"name": "a", "base_path": "b", "batchsize": 1}}]},
    "missing name": {"model_config_list": [{"config": {"base_path": "b"}}]},
    "no config": {"model_config_list": [{"name": "a", "base_path": "b"}]},
    "text for a number": {"model_config_list": [{"config": {"name": "a", "base_path": "b", "nireq": "4"}}]},
    "number out of range": {"model_config_list": [{"config": {"name": "a", "base_path": "b", "max_queue": -1}}]},
    "nested unknown key": {
        "model_config_list": [
            {"config": {"name": "a", "base_path": "b", "batching": {"max_batch_size": 2, "timeout": 3}}}
        ]
    },
    "two policies": {
        "model_config_list": [
            {"config": {"name": "a", "base_path": "b", "model_version_policy": {"all": {}, "latest": {}}}}
        ]
    },
    "remote with a folder": {
        "model_config_list": [{"config": {"name": "a", "remote": "grpc://a:1", "base_path": "b"}}]
    },
    "unknown task": {
        "model_config_list": [],
        "text_model_config_list": [{"config": {"name": "a", "base_path": "b", "task": "chat"}}],
    },
    "node without outputs": {
        "model_config_list": [],
        "pipeline_config_list": [
            {"name": "a", "inputs": [], "outputs": [], "nodes": [{"name": "n", "type": "DL model", "inputs": []}]}
        ],
    },
    "unknown type of a node": {
        "model_config_list": [],
        "pipeline_config_list": [
            {
                "name": "a",
                "inputs": [],
                "outputs": [],
                "nodes": [{"name": "n", "type": "model", "model_name": "m", "inputs": [], "outputs": []}],
            }
        ],
    },
    "two names in one source": {
        "model_config_list": [],
        "pipeline_config_list": [
            {
                "name": "a",
                "inputs": [],
                "nodes": [],
                "outputs": [{each: {"node_name": "n", "data_item": each} for each in "xy"}],
            }
        ],
    },
    "unknown isolation": {
        "model_config_list": [],
        "mediapipe_config_list": [{"name": "a", "python_isolation": "thread"}],
    },
    "metrics without a switch": {"model_config_list": [], "monitoring": {"metrics": {}}},
    "unknown placement": {"model_config_list": [{"config": {"name": "a", "base_path": "b", "placement": {"cpus": 2}}}]},
}


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_and_the_server_refuse_the_same(case: str, tmp_path: Path) -> None:
    assert not _is_valid(WRONG[case])
    assert _errors(WRONG[case], tmp_path)


def test_a_file_may_name_its_schema(tmp_path: Path) -> None:
    config = {"$schema": "https://example.com/config.schema.json", "model_config_list": []}
    assert _is_valid(config)
    assert _errors(config, tmp_path) == []


def _configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete configurations of samples, deployments and documentation."""
    for path in sorted((ROOT / "ovmstrio" / "samples").rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.keys() & set(LISTS):
            yield str(path.relative_to(ROOT)), {"model_config_list": [], **found}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks += [textwrap.dedent(each) for each in re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", text, re.MULTILINE)]
        for number, block in enumerate(blocks):
            try:
                found = json.loads(block)
            except ValueError:
                continue
            if isinstance(found, dict) and found.keys() & set(LISTS):
                yield f"{page.relative_to(ROOT)}, block {number}", {"model_config_list": [], **found}


CONFIGS = dict(_configs())


@pytest.mark.parametrize("place", CONFIGS)
def test_the_schema_accepts_each_configuration_of_samples_and_documentation(place: str) -> None:
    jsonschema.validate(CONFIGS[place], SCHEMA)


def test_configurations_are_found() -> None:
    assert len(CONFIGS) >= 10
