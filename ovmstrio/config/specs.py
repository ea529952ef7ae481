"""Validated configuration of services; the rest of the server uses only these values.

All configuration formats (``config.json``, command line) are converted to these.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ovmstrio.config.documents import InvalidValue, Place
from ovmstrio.config.schema import Key, parse_value
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.images import parse_resolution
from ovmstrio.core.tensor import Dim
from ovmstrio.stores.address import Address
from ovmstrio.util.truncation import MAX_ITEMS

if TYPE_CHECKING:
    from collections.abc import Iterable

# Cluster placement

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Replicas = Annotated[int, Field(ge=1, le=100_000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Autoscaling(_Part):
    """Autoscaling by running and waiting requests per replica."""

    min_replicas: Replicas = 1
    max_replicas: Replicas
    target_ongoing_requests: Annotated[float, Field(gt=0)] = 8.0
    target_waiting_requests: Annotated[float, Field(gt=0)] | None = None
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise InvalidValue("min_replicas <= max_replicas")
        return self


class PlacementSpec(_Part):
    """Cluster placement of a service.

    Attributes:
        group: services of a group share processes; empty for a separate group.
        replicas: number of replicas; None if not configured.
        autoscaling: replaces ``replicas``.
        num_cpus: CPU cores requested per replica.
        resources: other requested resources by name.
        max_ongoing_requests: concurrent requests per replica; others wait at the caller.
    """

    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]*$", max_length=200)] = ""
    replicas: Replicas | None = None
    autoscaling: Autoscaling | None = None
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    resources: dict[str, Annotated[float, Field(ge=0)]] | None = None
    max_ongoing_requests: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_number(self) -> PlacementSpec:
        if self.replicas is not None and self.autoscaling is not None:
            raise InvalidValue("either replicas or autoscaling")
        return self


def read_placement(value: Any, key: str = "placement") -> tuple[PlacementSpec, tuple[Problem, ...]]:
    """Parse a placement, a group name or an object; an invalid one is ignored as a whole."""
    try:
        return parse_value(key, {"group": value} if isinstance(value, str) else value, PlacementSpec), ()
    except ConfigError as error:
        return PlacementSpec(), error.problems


# Services

SpecT = TypeVar("SpecT", bound="ServableSpec")

Axes = Annotated[
    tuple[Annotated[int, Field(ge=0, le=64)], ...],
    Field(min_length=1),
    BeforeValidator(lambda value: value if isinstance(value, tuple | list) else (value,)),
]
"""Positions of dimensions in the shape of one tensor, or one position."""

VersionNumber = Annotated[int, Field(ge=1, le=2**63 - 1)]


class _Spec(BaseModel):
    # Deferred: unused models are not built.
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)


class LatestVersions(_Spec):
    """Policy: the ``num_versions`` highest versions."""

    kind: Annotated[Literal["latest"], Key()] = "latest"
    num_versions: VersionNumber = 1

    def select(self, available: Iterable[int]) -> list[int]:
        """Return the selected versions, ascending."""
        return sorted(available)[-self.num_versions :]


class AllVersions(_Spec):
    """Policy: all versions."""

    kind: Annotated[Literal["all"], Key()] = "all"

    def select(self, available: Iterable[int]) -> list[int]:
        """Return the selected versions, ascending."""
        return sorted(available)


class SpecificVersions(_Spec):
    """Policy: listed versions."""

    kind: Annotated[Literal["specific"], Key()] = "specific"
    versions: Annotated[tuple[VersionNumber, ...], Field(min_length=1)]

    def select(self, available: Iterable[int]) -> list[int]:
        """Return the selected versions, ascending."""
        return sorted(set(available) & set(self.versions))


VersionPolicy = LatestVersions | AllVersions | SpecificVersions


class BatchSpec(_Spec):
    """Batch size: ``auto`` follows requests, otherwise ``dim`` has the allowed sizes."""

    auto: bool = False
    dim: Dim | None = None


class ShapeSpec(_Spec):
    """Shape of one input: ``auto`` follows requests, otherwise ``dims``."""

    auto: bool = False
    dims: tuple[Dim, ...] | None = None


class LayoutSpec(_Spec):
    """Layout: ``tensor`` for requests, ``model`` for the model file if different (``NHWC:NCHW``)."""

    tensor: str
    model: str | None = None


class BatchingSpec(_Spec):
    """Dynamic batching.

    A batch runs when it has ``max_batch_size`` rows, ``batch_timeout_ms`` after its first request, or, if ``eager``,
    while
    the model is idle.  ``max_queue_size`` is the queue limit.
    """

    max_batch_size: Annotated[int, Field(ge=1, le=65_536)]
    batch_timeout_ms: Annotated[float, Field(ge=0, le=3_600_000)]
    max_queue_size: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    eager: bool = False


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in pairwise(sizes)):
        raise InvalidValue("each size larger than the one before", message="sizes are not ascending")
    return sizes


class DimensionBuckets(_Spec):
    """Padding buckets of a dimension: sizes are padded up to the next one of ``sizes``.

    ``inputs`` and ``outputs`` have axes by tensor.  Without inputs it is the batch dimension of each; without outputs
    they
    follow the inputs.  ``pad`` is the padding value by input (default 0).  Larger sizes are rejected, or run unpadded.
    """

    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...],
        Field(min_length=1, max_length=64),
        AfterValidator(_ascending),
    ]
    inputs: dict[str, Axes] = {}
    outputs: dict[str, Axes] | None = None
    pad: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    larger: Literal["refuse", "run"] = "refuse"
    warm_up: bool = True


class ServableSpec(_Spec):
    """Configuration of a named service.

    Attributes:
        origin: where it is configured, for messages.
        problems: errors of the settings; a service with errors fails to load.
        max_concurrency: concurrent calls; 0 is unlimited.
        required: whether the server is not ready while the service is missing.
        max_queue_time: longest wait of a call in seconds; None for that of the server.
        load_number: increased to force a reload with the same settings.
        sources: remote addresses whose local copies the paths lead to.
    """

    kind: ClassVar[str]
    """Name of the kind in messages."""
    queues_itself: ClassVar[bool] = False
    """True if the service has its own queue, even without concurrency limit."""

    name: str
    base_path: Path
    version_policy: VersionPolicy = LatestVersions()
    origin: str = ""
    problems: tuple[Problem, ...] = ()
    max_concurrency: Annotated[int, Field(ge=0)] = 0
    max_queue: Annotated[int, Field(ge=0)] = 100
    max_queue_time: Annotated[float, Field(ge=0)] | None = None
    placement: PlacementSpec = PlacementSpec()
    required: bool = True
    load_number: int = 0
    sources: tuple[Address, ...] = Field(default=(), exclude=True)
    place: Place | None = Field(default=None, exclude=True, repr=False)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that prevent loading."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def placed(self, problem: Problem) -> Problem:
        """Return a problem of the settings with its file position, if known."""
        if problem.file not in ("", self.origin):
            return problem
        return replace(problem, file=self.origin) if self.place is None else self.place.of(problem)

    def needs_reload(self, other: ServableSpec) -> bool:
        """Return whether loaded versions must be reloaded for ``other``; policy, problems and limits do not matter."""
        return type(self) is not type(other) or self.loaded_settings() != other.loaded_settings()

    def loaded_settings(self) -> dict[str, Any]:
        """Return the settings that affect loaded versions."""
        not_loaded = (
            "version_policy", "origin", "problems", "placement", "required",
            "max_concurrency", "max_queue", "max_queue_time", "sources",
        )  # fmt: skip
        left_out: dict[str, Any] = dict.fromkeys(not_loaded, True)
        left_out["nodes"] = {"__all__": {"origin"}}
        return self.model_dump(exclude=left_out)


class ModelSpec(ServableSpec):
    """Configuration of one model.

    ``shapes`` and ``layouts`` are by (mapped) tensor name; the key ``""`` is for the only input.  ``mean`` and
    ``scale``
    have one value or one per channel.  ``shape_buckets`` are by dimension name.
    """

    kind: ClassVar[str] = "model"

    batch: BatchSpec | None = None
    batching: BatchingSpec | None = None
    shapes: dict[str, ShapeSpec] = {}
    shape_buckets: dict[str, DimensionBuckets] = {}
    layouts: dict[str, LayoutSpec] = {}
    precisions: dict[str, str] = {}
    color_formats: dict[str, str] = {}
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    nireq: Annotated[int, Field(ge=0, le=100_000)] = 0
    target_device: str = "CPU"
    plugin_config: dict[str, str] = {}
    cache_dir: Path | None = None
    allow_cache: bool = False
    stateful: bool = False
    idle_sequence_cleanup: bool = True
    low_latency_transformation: bool = False
    max_sequence_number: Annotated[int, Field(ge=0, le=2**32 - 1)] = 500
    sequence_migration: bool = True


class PythonSpec(_Spec):
    """Execution of a service's Python code.

    ``isolation`` and ``memory_limit`` (bytes per process, 0 for unlimited) default to the server's settings with None.
    ``python`` is the interpreter of the processes, None for the server's.  ``timeout_seconds`` 0 is unlimited.
    """

    isolation: Literal["none", "process"] | None = None
    python: Path | None = None
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    timeout_seconds: Annotated[float, Field(ge=0)] = 0
    memory_limit: Annotated[int, Field(ge=0)] | None = None


class GraphSpec(ServableSpec):
    """Configuration of one graph, with the only version 1.

    ``base_path`` is the directory of relative paths in the graph file ``graph_path`` (both absolute).  ``subconfig``
    configures further models.  ``cache_dir`` is for derived files; None for the default.
    """

    kind: ClassVar[str] = "graph"

    graph_path: Path
    cache_dir: Path | None = None
    subconfig: Path | None = None
    python: PythonSpec = PythonSpec()


class HandlerSpec(ServableSpec):
    """Configuration of one handler project, with the only version 1.

    ``path`` is its directory or file, absolute; ``base_path`` is the directory.  The file is parsed at load time.
    """

    kind: ClassVar[str] = "handler"

    path: Path
    python: PythonSpec = PythonSpec()


class OpPipelineSpec(ServableSpec):
    """Configuration of one Op pipeline, with the only version 1.

    ``config`` is a ``config.yml`` that replaces the one of the script; ``script`` is the Python file of the service,
    None
    if a running script provides it.  ``base_path`` is the directory of the configuration.
    """

    kind: ClassVar[str] = "op pipeline"

    config: Path | None = None
    script: Path | None = None


class NodeInput(_Spec):
    """Source of an input: an output of a node, or an input of the pipeline with the node ``request``."""

    name: Annotated[str, Key()] = ""
    node: Annotated[str, Key("node_name")]
    data_item: str


class NodeOutput(_Spec):
    """Output of a node and its alias for other nodes."""

    data_item: str
    alias: str


class PipelineNode(_Spec):
    """One pipeline node: a servable (``model_name``) or a custom node (``library``).

    ``version`` 0 is the default version at the time of the call.  ``demultiply_count`` splits outputs along their first
    dimension, -1 for any size; None does not split.
    """

    name: str
    model_name: str = ""
    version: int = 0
    library: str = ""
    params: dict[str, str] = {}
    inputs: tuple[NodeInput, ...] = ()
    outputs: tuple[NodeOutput, ...] = ()
    demultiply_count: int | None = None
    gather_from_node: str | None = None
    origin: str = ""


class PipelineSpec(ServableSpec):
    """Configuration of one pipeline, with the only version 1.

    ``outputs`` name the node output of each pipeline output.  ``libraries`` are paths of used custom node libraries by
    name, or short names of built-in ones.
    """

    kind: ClassVar[str] = "pipeline"

    inputs: tuple[str, ...]
    outputs: tuple[NodeInput, ...]
    nodes: tuple[PipelineNode, ...]
    demultiply_count: int | None = None
    libraries: dict[str, Path] = {}


class MetricsSpec(_Spec):
    """Metrics settings; ``families`` None is the default set."""

    enable: bool = True
    families: tuple[str, ...] | None = None


class ServerSpec(_Spec):
    """Complete validated configuration.

    ``services`` have unique names.  ``problems`` belong to no service.  ``dependencies`` has the content of other
    files
    read, None for missing ones, for change detection.
    """

    services: tuple[ServableSpec, ...] = ()
    metrics: MetricsSpec | None = None
    problems: tuple[Problem, ...] = ()
    dependencies: dict[Path, bytes | None] = {}

    def of(self, spec: type[SpecT]) -> tuple[SpecT, ...]:
        """Return the services of one kind."""
        return tuple(each for each in self.services if isinstance(each, spec))


# Text models

PROMPT_LOOKUP: Final = "prompt_lookup"
"""Property name in openvino-genai."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Speed = Annotated[float, Field(gt=0, le=100)]


def _resolutions(text: str) -> str:
    for each in text.split() or ("",):
        parse_resolution(each)
    return text


Resolutions = Annotated[str, AfterValidator(_resolutions)]
"""One or several resolutions such as ``512x512``, separated by spaces."""


class LoraAdapter(_Spec):
    """A LoRA adapter of a language model, served as a model of its own.

    ``path`` is a folder in peft's format or a ``.safetensors`` file.  ``alpha`` multiplies the adapter's own scale,
    which is ``lora_alpha`` / ``r`` of its ``adapter_config.json``, and 1 without that file.
    """

    name: Annotated[str, Field(min_length=1)]
    path: Path
    alpha: Annotated[float, Field(allow_inf_nan=False)] = 1.0


class TextModelSpec(ServableSpec):
    """Configuration of one text, speech or image model, with the only version 1.

    Attributes:
        path: model directory for openvino-genai, or a ``.gguf`` file; absolute.
        plugin_config: device and pipeline properties, such as ``prompt_lookup``.
        cache_dir: directory for derived files; None for the default.
        max_num_batched_tokens: maximum tokens per engine step.
        cache_size: KV-cache size in GiB; 0 for a quarter of the free memory.
        max_num_seqs: maximum sequences per engine step.
        dynamic_split_fuse: whether a step mixes prefill chunks and decoding.
        best_of_limit: maximum ``best_of`` and ``n`` of a request.
        max_tokens_limit: maximum completion tokens; None for the context length.
        tool_parser: tool-call parser; empty for detection, ``none`` for none.
        reasoning_parser: reasoning parser; empty for detection, ``none`` for none.
        enable_tool_guided_generation: whether tool calls are constrained to their parameter schemas.
        chat_template_mode: chat-template renderer, Jinja or openvino-genai's ``MINJA``.
        max_model_len: maximum tokens of prompt and answer, or of a text; None for detection from the model's files.
        pooling: pooling of token vectors; None for detection from the model's files.
        normalize: whether embeddings have unit length; None for detection from the model's files.
        default_prompt_name: prompt that precedes texts to embed, by its name in the model's files; empty for none,
            None for the one that the files name.
        truncate: whether long embedding inputs are truncated instead of rejected.
        max_inputs: maximum texts of an embedding request, or documents of a rerank request.
        max_allowed_chunks: maximum document chunks of a rerank request.
        voices: speaker embedding files by voice name.
        speed_min: minimum speech speed; 1 is normal.
        max_resolution: maximum width and height of images, in requests and answers.
        default_resolution: width and height of images whose request has none; None for those of the model.
        max_num_images_per_prompt: maximum images of a request.
        default_num_inference_steps: denoising steps of requests that have none.
        max_num_inference_steps: maximum denoising steps of a request.
        resolution: the only resolutions of requests; a single one is compiled into the model.
        num_images_per_prompt: images of each request, compiled into the model with the only resolution.
        guidance_scale: guidance of each request, as ``num_images_per_prompt``.
        max_queue: maximum requests waiting for KV cache.
        kv_overcommit: overcommit factor of the KV cache.
        draft_path: draft model for speculative decoding, as ``path``; None for none.
        draft_device: device of the draft model; empty for that of the main model.
        draft_eagle3_mode: whether the draft model is one of EAGLE-3 even if its files do not tell.
        prompt_lookup: whether tokens are proposed from the earlier text.
        num_assistant_tokens: tokens proposed per step; None for the model's own default, or 5.
        reload: load the new version next to the old one (``swap``), unload first (``retire_first``), or ``auto``.
        idle_unload_seconds: idle time until the model is unloaded; 0 for never.
        lora_adapters: adapters to serve as further models; see :meth:`with_adapters`.
        adapter: adapter of this model; None for none.
        parent: name of the model that this one is an adapter of; empty for none.
    """

    kind: ClassVar[str] = "text model"
    queues_itself: ClassVar[bool] = True

    path: Path
    task: Task = Task.TEXT_GENERATION
    device: str = "CPU"
    plugin_config: dict[str, Any] = Field(default_factory=dict)
    cache_dir: Path | None = None
    max_num_batched_tokens: Count = 256
    cache_size: Annotated[float, Field(ge=0, le=2**20)] = 0
    max_num_seqs: Count = 256
    dynamic_split_fuse: bool = True
    enable_prefix_caching: bool = True
    best_of_limit: Count = 20
    max_tokens_limit: Count | None = None
    tool_parser: str = ""
    reasoning_parser: str = ""
    enable_tool_guided_generation: bool = False
    chat_template_mode: Literal["JINJA", "MINJA"] = "JINJA"
    max_model_len: Count | None = None
    pooling: Literal["CLS", "LAST", "MEAN"] | None = None
    normalize: bool | None = None
    default_prompt_name: str | None = None
    truncate: bool = False
    max_inputs: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 2048
    max_allowed_chunks: Count = 10_000
    enable_word_timestamps: bool = False
    voices: dict[str, Path] = Field(default_factory=dict)
    speed_min: Speed = 0.25
    speed_max: Speed = 4.0
    max_resolution: Resolutions = "4096x4096"
    default_resolution: Resolutions | None = None
    max_num_images_per_prompt: Count = 10
    default_num_inference_steps: Count = 50
    max_num_inference_steps: Count = 100
    resolution: Resolutions | None = None
    num_images_per_prompt: Count | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    kv_overcommit: Annotated[float, Field(gt=0, le=100)] = 1.0
    draft_path: Path | None = None
    draft_device: str = ""
    draft_eagle3_mode: bool = False
    prompt_lookup: bool = False
    num_assistant_tokens: Count | None = None
    reload: Literal["auto", "swap", "retire_first"] = "auto"
    idle_unload_seconds: Annotated[float, Field(ge=0)] = 0
    lora_adapters: tuple[LoraAdapter, ...] = ()
    adapter: LoraAdapter | None = None
    parent: str = ""

    def loaded_settings(self) -> dict[str, Any]:
        """Return the settings that affect loaded versions; the engine also uses the queue limits."""
        limits = {"max_queue": self.max_queue, "max_queue_time": self.max_queue_time}
        return {**super().loaded_settings(), **limits}

    def with_adapter(self, adapter: LoraAdapter) -> TextModelSpec:
        """Return the model with an adapter, under the adapter's name."""
        served = {"name": adapter.name, "adapter": adapter, "parent": self.parent or self.name}
        return self.model_copy(update={**served, "lora_adapters": ()})

    def with_adapters(self) -> list[TextModelSpec]:
        """Return the model without adapters, and with each of its adapters."""
        adapted = map(self.with_adapter, self.lora_adapters)
        return [self.model_copy(update={"lora_adapters": ()}) if self.lora_adapters else self, *adapted]

    @property
    def looks_up(self) -> bool:
        """True if prompt lookup is enabled."""
        return self.prompt_lookup or str(self.plugin_config.get(PROMPT_LOOKUP, "")).lower() in {"true", "1"}

    @property
    def max_assistant_tokens(self) -> int:
        """Most tokens that may be proposed per step: a half of those of a step, which the proposals must fit."""
        return max(1, self.max_num_batched_tokens // 2)
