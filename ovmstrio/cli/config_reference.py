"""Generator of the reference of ``config.json`` and of its JSON schema, from the schemas that read the file.

``python -m ovmstrio.cli.config_reference FOLDER`` writes ``config_keys.md`` and ``config.schema.json``.

::

    schemas of the lists (keys, types) ┐
    specifications (defaults, bounds)  ├─> JSON schema ─> rows of the reference
    KEYS (meaning and example)         ┘
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import PydanticUndefined

from ovmstrio.config.config_file import Monitoring, file_schema
from ovmstrio.config.model_entries import GraphEntry, ModelEntry
from ovmstrio.config.model_options import MODEL_OPTIONS
from ovmstrio.config.pipeline_entries import TARGET_KEYS, LibraryEntry, PipelineEntry
from ovmstrio.config.remote_entries import RemoteEntry, RemoteSpec
from ovmstrio.config.schema import keys_of
from ovmstrio.config.service_options import PYTHON_KEYS, PythonEntry, ServiceEntry
from ovmstrio.config.specs import (
    AllVersions,
    Axes,
    DimensionBuckets,
    GraphSpec,
    HandlerSpec,
    LatestVersions,
    MetricsSpec,
    ModelSpec,
    NodeInput,
    OpPipelineSpec,
    PipelineSpec,
    PlacementSpec,
    PythonSpec,
    ServableSpec,
    SpecificVersions,
    TextModelSpec,
)
from ovmstrio.config.text_entries import TextModelEntry
from ovmstrio.handlers.kind import HandlerEntry
from ovmstrio.ops.kind import OpPipelineEntry
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.settings import ServerSettings

ADDRESS: Final = "https://json-schema.org/draft/2020-12/schema"


class _Section(NamedTuple):
    """A part of the file: its key, the schema of an entry, the specification with the defaults, and a first sentence.

    ``form`` is where the keys of an entry are. Sections without a key have keys that several lists share.
    """

    key: str
    entry: Any
    spec: Any
    title: str
    form: str
    about: str


_CONFIG_FORM: Final = 'a list of `{"config": {...}}` with these keys'
_PLAIN_FORM: Final = "a list of objects with these keys"
SHARED: Final = (
    _Section("", ServiceEntry, ServableSpec, "Keys of all services", "",
             "Limits, readiness and cluster placement ([admission.md](admission.md), [readiness.md](readiness.md), "
             "[ray.md](ray.md))."),
    _Section("", PythonEntry, None, "Keys of graphs and handlers", "",
             "Processes of their Python code ([graphs.md](graphs.md))."),
)  # fmt: skip
SECTIONS: Final = (
    _Section("model_config_list", ModelEntry, ModelSpec, "Models", _CONFIG_FORM,
             "OpenVINO models; an entry whose folder has a `graph.pbtxt` is a graph. The list is required."),
    _Section("model_config_list", RemoteEntry, RemoteSpec, "Models of other servers", _CONFIG_FORM,
             "Entries with the key `remote` ([remote.md](remote.md))."),
    _Section("mediapipe_config_list", GraphEntry, GraphSpec, "Graphs", _PLAIN_FORM,
             "Packet graphs ([graphs.md](graphs.md))."),
    _Section("pipeline_config_list", PipelineEntry, PipelineSpec, "Pipelines", _PLAIN_FORM,
             "Pipelines of models and custom nodes ([pipelines.md](pipelines.md))."),
    _Section("custom_node_library_config_list", LibraryEntry, None, "Custom nodes", _PLAIN_FORM,
             "Libraries of pipeline nodes ([custom_nodes.md](custom_nodes.md))."),
    _Section("text_model_config_list", TextModelEntry, TextModelSpec, "Text and speech models", _CONFIG_FORM,
             "Language, embedding, rerank and speech models ([genai.md](genai.md))."),
    _Section("handler_config_list", HandlerEntry, HandlerSpec, "Handlers", _PLAIN_FORM,
             "Projects with a `nucleus.yaml` ([handlers.md](handlers.md))."),
    _Section("op_pipeline_config_list", OpPipelineEntry, OpPipelineSpec, "Pipelines of Ops", _PLAIN_FORM,
             "Paddle Serving pipelines ([ops.md](ops.md))."),
    _Section("monitoring", Monitoring, MetricsSpec, "Monitoring", "an object with these keys",
             "Metrics of the server ([metrics.md](metrics.md))."),
)  # fmt: skip
UNSUPPORTED: Final = "custom_loader_config_list"

KEYS: Final[Mapping[str, tuple[str, Any]]] = {
    # All lists
    "name": ("Name in requests; unique in the file.", "resnet"),
    "max_concurrency": ("Maximum concurrent calls; further calls are queued. 0 is unlimited.", 8),
    "max_queue": ("Queue length of max_concurrency; further calls are refused.", 200),
    "max_queue_time": ("Longest wait in seconds in the queue; a call that cannot start within it is refused.", 0.5),
    "required": ("Whether the server is not ready without the service.", False),
    "placement": ("Process group and replicas in a cluster, or the name of the group.", "gpu"),
    "placement.group": ("Services of a group share processes; by default each service has its own.", "vision"),
    "placement.replicas": ("Number of replicas.", 2),
    "placement.autoscaling": ("Number of replicas by load, instead of replicas.", {"max_replicas": 4}),
    "placement.autoscaling.min_replicas": ("Minimum replicas.", 1),
    "placement.autoscaling.max_replicas": ("Maximum replicas.", 4),
    "placement.autoscaling.target_ongoing_requests": ("Running requests per replica to aim at.", 8.0),
    "placement.autoscaling.target_waiting_requests": ("Waiting requests per replica to aim at.", 2.0),
    "placement.autoscaling.upscale_delay_s": ("Seconds of load before replicas are added.", 30.0),
    "placement.autoscaling.downscale_delay_s": ("Seconds without load before replicas are removed.", 600.0),
    "placement.num_cpus": ("CPU cores requested for each replica.", 2),
    "placement.resources": ("Other resources requested for each replica.", {"NPU": 1}),
    "placement.max_ongoing_requests": ("Concurrent requests of a replica; others wait at the caller.", 16),
    # Python code
    "python_isolation": ("Run Python code in the server (none) or in separate processes (process).", "process"),
    "python": ("Python interpreter of the processes; by default the server's.", "venv/bin/python"),
    "python_processes": ("Number of processes.", 2),
    "python_timeout_seconds": ("Longest run of one call in a process; 0 is unlimited.", 10),
    "python_memory_limit": ("Memory limit in bytes of each process; 0 is unlimited. By default the server's.", 2**30),
    # Models
    "model_config_list.base_path": ("Folder with version folders, or a model file.", "models/resnet"),
    "batch_size": ("", "1:8"),
    "batching": ("Dynamic batching.", {"max_batch_size": 16, "batch_timeout_ms": 5}),
    "batching.max_batch_size": ("Rows at which a batch is full.", 16),
    "batching.batch_timeout_ms": ("Longest wait of the first request of a batch, in milliseconds.", 5),
    "batching.max_queue_size": ("Maximum waiting requests; further ones are refused.", 1024),
    "batching.eager": ("Run at once while the model is idle.", True),
    "shape": ("", {"image": "(1,3,224,224)"}),
    "shape_buckets": ("Padding buckets by dimension: a list of sizes, or an object.", {"batch": [1, 4, 16]}),
    "shape_buckets.*.sizes": ("Sizes to which a dimension is padded, ascending.", [32, 64]),
    "shape_buckets.*.inputs": ("Position of the dimension by input; by default that of the batch.", {"ids": 1}),
    "shape_buckets.*.outputs": ("Position of the dimension by output; by default as in the inputs.", {"scores": 1}),
    "shape_buckets.*.pad": ("Padding value by input; 0 by default.", {"ids": 1}),
    "shape_buckets.*.larger": ("Larger sizes are refused (refuse), or run unpadded (run).", "run"),
    "shape_buckets.*.warm_up": ("Run each size once at load.", False),
    "layout": ("", "NHWC:NCHW"),
    "mean": ("", [123.7, 116.3, 103.5]),
    "scale": ("", 127.5),
    "precision": ("", "UINT8:FP32"),
    "color_format": ("", "BGR:RGB"),
    "model_version_policy": ("Versions to serve.", {"latest": {"num_versions": 2}}),
    "model_version_policy.latest.num_versions": ("Number of versions, the highest ones.", 2),
    "model_version_policy.specific.versions": ("Versions.", [1, 3]),
    "nireq": ("", 4),
    "model_config_list.target_device": ("OpenVINO device ([devices.md](devices.md)).", "AUTO"),
    "plugin_config": ("", {"NUM_STREAMS": "2"}),
    "max_sequence_number": ("", 1000),
    "stateful": ("", True),
    "idle_sequence_cleanup": ("", False),
    "low_latency_transformation": ("", True),
    "sequence_migration": ("", False),
    "allow_cache": ("Keep compiled models in --cache-dir even if their shapes follow requests (auto).", True),
    "model_config_list.graph_path": ("Makes the entry a graph: its file below base_path.", "graph.pbtxt"),
    "model_config_list.subconfig": ("Makes the entry a graph: file with its models below base_path.", "subconfig.json"),
    "custom_loader_options": ("Not supported: the model is not loaded.", None),
    # Remote models
    "remote": ("Address or equivalent addresses: grpc, grpcs, http or https, with host and port.", "grpc://gpu-1:9000"),
    "remote_name": ("Name on the other server; by default the same.", "resnet50"),
    "remote_version": ("Version on the other server; by default its default version.", 2),
    "timeout_seconds": ("Timeout of a call, in addition to the caller's deadline.", 10.0),
    "connect_seconds": ("Timeout of connecting.", 2.0),
    "health_seconds": ("Interval of readiness checks of each address.", 1.0),
    "max_attempts": ("Maximum attempts of a call, as long as no data was sent.", 2),
    "retry_pause_ms": ("Pause in milliseconds after all addresses have failed; increases.", 100.0),
    "hedge_after_ms": ("Delay in milliseconds of a second call to another address; 0 for none.", 200.0),
    "breaker": ("Circuit breaker of each address.", {"failures": 3}),
    "breaker.failures": ("Consecutive failures until it opens; 0 for never.", 3),
    "breaker.open_seconds": ("Seconds for which it stays open.", 30.0),
    "tls": ("TLS files, PEM, relative to the file.", {"ca": "ca.pem"}),
    "tls.ca": ("Trusted certificate authority; by default the system's.", "ca.pem"),
    "tls.cert": ("Client certificate.", "client.pem"),
    "tls.key": ("Key of the client certificate.", "client.key"),
    "tls.server_name": ("Name in the server's certificate, if it differs from the host.", "models.example"),
    # Graphs
    "mediapipe_config_list.base_path": ("Folder of the graph; by default the name.", "graphs/chat"),
    "graph_path": ("Graph file below base_path; by default graph.pbtxt.", "graph.pbtxt"),
    "subconfig": ("File with a model_config_list for the graph's models; by default subconfig.json.", "subconfig.json"),
    # Pipelines
    "inputs": ("Tensors of a request.", ["image"]),
    "outputs": ("Tensors of a response with their sources.", [{"label": {"node_name": "first", "data_item": "out"}}]),
    "outputs[].*.node_name": ("Node, or request.", "first"),
    "outputs[].*.data_item": ("Alias of an output of the node, or an input of the request.", "out"),
    "demultiply_count": ("Split the tensors of a request along their first dimension; -1 for any size.", -1),
    "nodes": ("Calls of services and custom nodes, in any order.", []),
    "nodes[].name": ("Unique name in the pipeline.", "first"),
    "nodes[].type": ("DL model calls a service, custom a custom node.", "DL model"),
    "nodes[].model_name": ("Service to call, for DL model.", "resnet"),
    "nodes[].library_name": ("Custom node library, for custom.", "vote"),
    "nodes[].version": ("Version of the model; by default its default version.", 2),
    "nodes[].inputs": ("Inputs of the model or custom node, each with its source.", []),
    "nodes[].inputs[].*.node_name": ("Node, or request.", "request"),
    "nodes[].inputs[].*.data_item": ("Alias of an output of the node, or an input of the request.", "image"),
    "nodes[].outputs": ("Outputs of the model or custom node, with names for other nodes.", []),
    "nodes[].outputs[].data_item": ("Name of the output.", "probabilities"),
    "nodes[].outputs[].alias": ("Name for other nodes.", "out"),
    "nodes[].params": ("Parameters of a custom node.", {"threshold": "0.5"}),
    "nodes[].demultiply_count": ("Split the outputs along their first dimension; -1 for any size.", 2),
    "nodes[].gather_from_node": ("Node whose split is gathered at the inputs.", "first"),
    "custom_node_library_config_list.name": ("Name for library_name; unique in the list.", "vote"),
    "custom_node_library_config_list.base_path": ("Library, Python file or built-in node.", "nodes/vote.py"),
    # Text models
    "text_model_config_list.base_path": ("Folder of the model, or a .gguf file.", "models/qwen3"),
    "task": ("", "text_generation"),
    "text_model_config_list.target_device": ("OpenVINO device ([devices.md](devices.md)).", "CPU"),
    "text_model_config_list.plugin_config": ("Device and pipeline properties.", {"NUM_STREAMS": "1"}),
    "idle_unload_seconds": ("", 600),
    "kv_cache_precision": ("", "u8"),
    "pipeline_type": ("", "AUTO"),
    "max_num_batched_tokens": ("", 512),
    "cache_size": ("", 8),
    "max_num_seqs": ("", 64),
    "dynamic_split_fuse": ("", True),
    "enable_prefix_caching": ("", True),
    "best_of_limit": ("", 4),
    "max_tokens_limit": ("", 4096),
    "max_model_len": ("", 8192),
    "tool_parser": ("", "hermes3"),
    "reasoning_parser": ("", "qwen3"),
    "enable_tool_guided_generation": ("", True),
    "chat_template_mode": ("", "JINJA"),
    "kv_overcommit": ("", 1.5),
    "reload": ("", "retire_first"),
    "draft_models_path": ("", "models/draft"),
    "draft_device": ("", "CPU"),
    "draft_eagle3_mode": ("", True),
    "prompt_lookup": ("", True),
    "num_assistant_tokens": ("", 3),
    "lora_adapters": ("LoRA adapters to serve as further models.", [{"name": "sql", "path": "adapters/sql"}]),
    "lora_adapters[].name": ("Name of the model with the adapter.", "sql"),
    "lora_adapters[].path": ("Folder in peft's format, or a .safetensors file.", "adapters/sql"),
    "lora_adapters[].alpha": ("Factor of the adapter's own scale.", 0.5),
    "pooling": ("", "MEAN"),
    "normalize": ("", False),
    "default_prompt_name": ("", "query"),
    "truncate": ("", True),
    "max_inputs": ("", 256),
    "max_allowed_chunks": ("", 1000),
    "enable_word_timestamps": ("", True),
    "voices": ("Speaker embedding files by voice name, relative to the file.", {"anna": "voices/anna.bin"}),
    "speed_min": ("", 0.5),
    "speed_max": ("", 2.0),
    "max_resolution": ("", "1024x1024"),
    "default_resolution": ("", "512x512"),
    "max_num_images_per_prompt": ("", 4),
    "default_num_inference_steps": ("", 20),
    "max_num_inference_steps": ("", 50),
    "resolution": ("", "512x512"),
    "num_images_per_prompt": ("", 1),
    "guidance_scale": ("", 7.5),
    # Handlers and pipelines of Ops
    "handler_config_list.path": ("Folder with a nucleus.yaml, or that file; relative to the file.", "projects/iris"),
    "op_pipeline_config_list.path": ("The config.yml of the Ops, or its folder; relative to the file.", "ops/ocr"),
    "service": ("Python script of the service; by default web_service.py next to config.yml.", "ops/ocr/service.py"),
    # Monitoring
    "metrics": ("Metrics of the server.", {"enable": True}),
    "metrics.enable": ("Serve /metrics.", True),
    "metrics.metrics_list": ("Metric families that replace the default ones.", ["ovms_requests_success"]),
}  # fmt: skip
"""Meaning and example of each key by its path, with that of its list in front where lists differ.

A key with an empty meaning has that of the option of the same name (``ovms serve``).
"""


# JSON schema


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of ``config.json`` and ``subconfig.json``."""
    bodies: dict[str, list[dict[str, Any]]] = {}
    for section in SECTIONS:
        bodies.setdefault(section.key, []).append(_Builder(section).mapping(section.entry, ""))
    properties: dict[str, Any] = {}
    for section in SECTIONS:
        body, *others = bodies[section.key]
        if others:
            body = {"type": "object", "if": {"required": ["remote"]}, "then": others[0], "else": body}
        if section.form is _CONFIG_FORM:
            body = {
                "type": "object",
                "properties": {"config": body},
                "required": ["config"],
                "additionalProperties": False,
            }
        properties[section.key] = body if section.key == "monitoring" else {"type": "array", "items": body}
    properties[UNSUPPORTED] = {"type": "array", "items": {"type": "object"}, "description": "Not supported; ignored."}
    properties["$schema"] = {"type": "string", "description": "Address of this schema, for editors."}
    read = keys_of(file_schema(KINDS.values()))
    if read.keys() != properties.keys():
        raise ValueError(f"keys of config.json without a section: {sorted(read.keys() ^ properties.keys())}")
    return {
        "$schema": ADDRESS,
        "title": "Configuration of ovmstrio (config.json)",
        "$defs": {"placement": _Builder(SHARED[0]).placement()},
        "type": "object",
        "properties": properties,
        "required": [key for key, each in read.items() if each.is_required],
        "additionalProperties": False,
    }


def schema_text() -> str:
    """Return the schema as a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


class _Builder:
    """Builder of the schema of one section."""

    def __init__(self, section: _Section) -> None:
        self.section = section

    def mapping(self, schema: Any, path: str) -> dict[str, Any]:
        """Return the schema of an object; ``path`` is empty for an entry, whose defaults the specification has."""
        properties: dict[str, Any] = {}
        required = []
        for key, each in keys_of(schema).items():
            at = f"{path}.{key}" if path else key
            field = self._spec_field(key) if not path else schema.model_fields.get(each.name)
            properties[key] = {**self._property(key, at, each.type, field), "description": self._meaning(at)}
            example = _row(self.section, at)[1]
            properties[key] |= {"examples": [example]} if example not in (None, []) else {}
            if each.is_required:
                required.append(key)
        found: dict[str, Any] = {"type": "object", "properties": properties}
        return found | ({"required": required} if required else {}) | {"additionalProperties": False}

    def _property(self, key: str, path: str, kind: Any, field: Any) -> dict[str, Any]:
        if path == _PLACEMENT:
            return {"$ref": f"#/$defs/{_PLACEMENT}"}
        if path == "nodes[].type":
            return {"enum": list(TARGET_KEYS)}
        if path == "shape_buckets":
            found = self._shape_buckets(path)
        elif path == "model_version_policy":
            found = self._model_version_policy(path)
        elif field is not None and self._has_type_of_spec(key, path):
            metadata = field.metadata
            found = self.value(Annotated[field.annotation, *metadata] if metadata else field.annotation, path)
        else:
            found = self.value(kind, path)
        default = _plain(getattr(field, "default", None))
        return found if default is None else {**found, "default": default}

    def _spec_field(self, key: str) -> Any:
        spec = self.section.spec
        if key in PYTHON_KEYS and key != "python":
            return PythonSpec.model_fields[key.removeprefix("python_")]
        names = {"target_device": "device", "draft_models_path": "draft_path"} if spec is TextModelSpec else {}
        name = MODEL_OPTIONS[key].field if spec is ModelSpec and key in MODEL_OPTIONS else names.get(key, key)
        return spec.model_fields.get(name) if spec is not None else None

    def _has_type_of_spec(self, key: str, path: str) -> bool:
        """Return whether a value is read as the type of the specification, whose bounds are narrower."""
        if "." in path or key in {"breaker", "tls", "batching"}:
            return True
        spec = self.section.spec
        if spec is TextModelSpec:
            return key not in {"name", "base_path", "plugin_config"}
        return spec is ModelSpec and key in MODEL_OPTIONS and MODEL_OPTIONS[key].parse is None

    def value(self, kind: Any, path: str) -> dict[str, Any]:
        """Return the schema of a value of a type."""
        origin, inner = get_origin(kind), get_args(kind)
        others = [each for each in inner if each is not type(None)]
        if kind == Axes:
            position = {"type": "integer", "minimum": 0, "maximum": 64}
            return {"anyOf": [position, {"type": "array", "items": position, "minItems": 1}]}
        if not _holds_schema(kind):
            optional = origin in {Union, UnionType} and len(others) == 1
            return _of_pydantic(others[0] if optional else kind)
        if origin in {Annotated, Union, UnionType}:
            return self.value(others[0], path)
        if origin in {list, tuple}:
            return {"type": "array", "items": self.value(inner[0], f"{path}[]")}
        if origin is dict:
            # A source of a pipeline is an object with one name.
            size = {"minProperties": 1, "maxProperties": 1} if inner[1] is NodeInput else {}
            return {"type": "object", "additionalProperties": self.value(inner[1], f"{path}.*"), **size}
        return self.mapping(kind, path)

    def _meaning(self, path: str) -> str:
        option = ServerSettings.model_fields.get(path)
        return _row(self.section, path)[0] or ((option and option.description) or "").replace("--", "")

    def placement(self) -> dict[str, Any]:
        """Return the schema of a placement, a group's name or an object."""
        return {"anyOf": [{"type": "string"}, self.mapping(PlacementSpec, _PLACEMENT)]}

    def _shape_buckets(self, path: str) -> dict[str, Any]:
        sizes = self.value(keys_of(DimensionBuckets)["sizes"].type, path)
        dimension = {"anyOf": [sizes, self.mapping(DimensionBuckets, f"{path}.*")]}
        return {"type": "object", "additionalProperties": dimension}

    def _model_version_policy(self, path: str) -> dict[str, Any]:
        policies = {"latest": LatestVersions, "all": AllVersions, "specific": SpecificVersions}
        properties = {name: self.mapping(policy, f"{path}.{name}") for name, policy in policies.items()}
        one = {"minProperties": 1, "maxProperties": 1, "additionalProperties": False}
        return {"type": "object", "properties": properties, **one}


_PLACEMENT: Final = "placement"


def _holds_schema(kind: Any) -> bool:
    """Return whether a type is a schema, or contains one, or positions of dimensions."""
    is_schema = isinstance(kind, type) and issubclass(kind, BaseModel)
    return is_schema or kind == Axes or any(map(_holds_schema, get_args(kind)))


def _of_pydantic(kind: Any) -> dict[str, Any]:
    config = ConfigDict(arbitrary_types_allowed=True)
    schema = TypeAdapter(kind, config=None if _is_enum(kind) else config).json_schema()
    return {key: each for key, each in _normal(schema).items() if key not in {"title", "description"}}


def _normal(value: Any) -> Any:
    """Remove differences between releases of pydantic: 0.0 for 0, and the default of additionalProperties."""
    if isinstance(value, dict):
        return {key: _normal(each) for key, each in value.items() if (key, each) != ("additionalProperties", True)}
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _plain(default: Any) -> Any:
    """Return a default in JSON; None if there is none to show."""
    if default is PydanticUndefined or isinstance(default, BaseModel | Path) or default in ({}, (), ""):
        return None
    return default.value if isinstance(default, Enum) else default


def _row(section: _Section, path: str) -> tuple[str, Any]:
    """Return the meaning and example of a key."""
    for key in (f"{section.key}.{path}", path):
        if key in KEYS:
            return KEYS[key]
    raise ValueError(f"the key {section.key}.{path} has no row in KEYS")


# Reference

_HEAD: Final = """# Keys of `config.json`

Every key, with its type, default, an example and its meaning. `ovms check config.json` reports unknown keys and invalid
values with file and line. Paths are relative to the file. `subconfig.json` of a graph has a `model_config_list` only.

Editors complete and check keys with the JSON schema [config.schema.json](config.schema.json): name its path or address
in the file, as its key `$schema`.

    {
      "$schema": "config.schema.json",
      "model_config_list": [
        {"config": {"name": "resnet", "base_path": "models/resnet"}}
      ]
    }

This page and the schema are generated from the types that read the file (`just docs`).
"""


def reference() -> str:
    """Return the reference page."""
    definitions = json_schema()["$defs"]
    parts = [_HEAD]
    shared: dict[str, str] = {}
    for section in (*SHARED, *SECTIONS):
        body = _Builder(section).mapping(section.entry, "")
        rows = {path: _markdown_row(path, each, needed) for path, each, needed in _rows(body, "", definitions)}
        title = f"{section.title}: `{section.key}`" if section.key else section.title
        form = f" As {section.form}." if section.form else ""
        own = [row for row in rows.values() if row not in shared.values()]
        head = "| key | type | default | example | meaning |\n|---|---|---|---|---|\n"
        parts.append(f"\n## {title}\n\n{section.about}{form}\n\n{head}" + "".join(f"{row}\n" for row in own))
        shared |= {} if section.key else rows
    parts.append(f"\n`{UNSUPPORTED}` is accepted and ignored with a warning.\n")
    return "".join(parts)


_Row = tuple[str, Mapping[str, Any], bool]
"""Path of a key, its schema, and whether it is required."""


def _rows(schema: Mapping[str, Any], path: str, definitions: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the keys of an object and of the objects below it."""
    for key, each in schema.get("properties", {}).items():
        at = f"{path}.{key}" if path else key
        known = {**definitions[_PLACEMENT], **each} if "$ref" in each else each
        if "description" in known:
            yield at, known, key in schema.get("required", ())
        yield from _rows(known, at, definitions)
    for each in schema.get("anyOf", ()):
        yield from _rows(each, path, definitions)
    for key, step in (("additionalProperties", ".*"), ("items", "[]")):
        if isinstance(schema.get(key), Mapping):
            yield from _rows(schema[key], f"{path}{step}", definitions)


def _markdown_row(path: str, schema: Mapping[str, Any], is_required: bool) -> str:
    default = "required" if is_required else f"`{_json(schema['default'])}`" if "default" in schema else ""
    example = f"`{_json(schema['examples'][0])}`" if "examples" in schema else ""
    return f"| `{path}` | {type_text(schema)} | {default} | {example} | {schema['description']} |"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_UNBOUNDED: Final = 2**31 - 1
"""Bound of a type, which no configuration reaches."""


def type_text(schema: Mapping[str, Any]) -> str:
    """Describe the values that a schema accepts."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_text(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    above = f" above {low}" if "exclusiveMinimum" in schema else f" from {low}" if low is not None else ""
    upto = f" to {schema['maximum']}" if schema.get("maximum", _UNBOUNDED) < _UNBOUNDED else ""
    return words.get(kind, str(kind)) + above + upto


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "config_keys.md").write_text(reference(), encoding="utf-8")
    (folder / "config.schema.json").write_text(schema_text(), encoding="utf-8")
