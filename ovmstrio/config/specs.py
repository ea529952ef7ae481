"""What a validated configuration says of each model and graph: values that the rest of the server works with.

Every way to write a configuration (``config.json``, command line) ends in these; nothing below this layer sees the
user's spelling of a shape or a policy.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ovmstrio.config.documents import Place, expected_by, shown
from ovmstrio.core.errors import Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.tensor import Dim

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PROMPT_LOOKUP",
    "AllVersions",
    "Autoscaling",
    "BatchSpec",
    "BatchingSpec",
    "BucketedDimension",
    "GraphSpec",
    "HandlerSpec",
    "LatestVersions",
    "LayoutSpec",
    "MetricsSpec",
    "ModelSpec",
    "NodeInput",
    "NodeOutput",
    "OpPipelineSpec",
    "PipelineNode",
    "PipelineSpec",
    "PlacementSpec",
    "PythonSpec",
    "ServableSpec",
    "ServerSpec",
    "ShapeSpec",
    "SpecificVersions",
    "TextModelSpec",
    "VersionPolicy",
    "read_placement",
]

# ----------------------------------------------------------------------
# Where the service of an entry runs in a cluster: with which others, in how many replicas, and with what each has
# ----------------------------------------------------------------------

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Replicas = Annotated[int, Field(ge=1, le=100_000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Autoscaling(_Part):
    """How many replicas there are, by the requests that each has under way, and by those of them that wait there."""

    min_replicas: Replicas = 1
    max_replicas: Replicas
    target_ongoing_requests: Annotated[float, Field(gt=0)] = 8.0
    target_waiting_requests: Annotated[float, Field(gt=0)] | None = None
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is not above max_replicas")
        return self


class PlacementSpec(_Part):
    """What an entry says of its place in a cluster.

    Attributes:
        group: services of one group run in the same processes; empty for a group of its own.
        replicas: how many processes there are of the group; None where nothing is said.
        autoscaling: how their number follows the load, in place of ``replicas``.
        num_cpus: the cores that a replica asks the cluster for.
        resources: what else it asks for, by name.
        max_ongoing_requests: what a replica is given at once; others wait where they come from.
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
            raise ValueError("either replicas or autoscaling, and not both")
        return self


def read_placement(value: Any, key: str = "placement") -> tuple[PlacementSpec, tuple[Problem, ...]]:
    """Read what an entry says: a group's name, or an object; where something is wrong, all of that."""
    try:
        return PlacementSpec.model_validate({"group": value} if isinstance(value, str) else value), ()
    except ValidationError as error:
        return PlacementSpec(), tuple(
            Problem(
                "the value cannot be used",
                path=".".join([key, *map(str, fault["loc"])]),
                expected=f"a key of {', '.join(PlacementSpec.model_fields)}"
                if fault["type"] == "extra_forbidden"
                else expected_by(fault),
                found=shown(fault["input"]),
            )
            for fault in error.errors(include_url=False)
        )


# ----------------------------------------------------------------------
# What a validated configuration says of each model and graph: values that the rest of the server works with
# ----------------------------------------------------------------------

SpecT = TypeVar("SpecT", bound="ServableSpec")

Axes = Annotated[tuple[Annotated[int, Field(ge=0, le=64)], ...], Field(min_length=1)]
"""Positions of dimensions in the shape of one tensor."""


class _Spec(BaseModel):
    # What no entry of the configuration needs is not built.
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)


class LatestVersions(_Spec):
    """Serve the ``num_versions`` highest versions."""

    kind: Literal["latest"] = "latest"
    num_versions: Annotated[int, Field(ge=1)] = 1

    def select(self, available: Iterable[int]) -> list[int]:
        """Pick versions out of those available, ascending."""
        return sorted(available)[-self.num_versions :]


class AllVersions(_Spec):
    """Serve every version."""

    kind: Literal["all"] = "all"

    def select(self, available: Iterable[int]) -> list[int]:
        """Pick versions out of those available, ascending."""
        return sorted(available)


class SpecificVersions(_Spec):
    """Serve the versions listed, as far as they exist."""

    kind: Literal["specific"] = "specific"
    versions: tuple[int, ...]

    def select(self, available: Iterable[int]) -> list[int]:
        """Pick versions out of those available, ascending."""
        return sorted(set(available) & set(self.versions))


VersionPolicy = LatestVersions | AllVersions | SpecificVersions


class BatchSpec(_Spec):
    """The batch size asked for: ``auto`` follows requests, otherwise ``dim`` says which sizes are accepted."""

    auto: bool = False
    dim: Dim | None = None


class ShapeSpec(_Spec):
    """The shape asked for one input: ``auto`` follows requests, otherwise ``dims``."""

    auto: bool = False
    dims: tuple[Dim, ...] | None = None


class LayoutSpec(_Spec):
    """A layout: ``tensor`` as the caller sees it, ``model`` as the file has it where the two differ (``NHWC:NCHW``)."""

    tensor: str
    model: str | None = None


class BatchingSpec(_Spec):
    """How the requests of many callers are joined into one inference.

    A batch runs when it has ``max_batch_size`` rows, when its first request has waited for ``batch_timeout_ms``, or, if
    ``eager``, while the model has nothing else to do.  ``max_queue_size`` requests may wait.
    """

    max_batch_size: Annotated[int, Field(ge=1, le=65_536)]
    batch_timeout_ms: Annotated[float, Field(ge=0, le=3_600_000)]
    max_queue_size: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    eager: bool = False


class BucketedDimension(_Spec):
    """A dimension that inputs share, and the sizes up to which it is padded: the least that is not smaller.

    ``inputs`` and ``outputs`` give positions in shapes by tensor.  No inputs stand for the batch dimension of each, and
    no outputs for whatever follows the inputs.  ``pad`` has the value for an input, which is 0 otherwise.  What is
    larger than the last size is refused, or run as it is.
    """

    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...], Field(min_length=1, max_length=64)]
    inputs: dict[str, Axes] = {}
    outputs: dict[str, Axes] | None = None
    pad: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    larger: Literal["refuse", "run"] = "refuse"
    warm_up: bool = True

    @field_validator("sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(low >= high for low, high in pairwise(sizes)):
            raise ValueError("the sizes do not ascend")
        return sizes


class ServableSpec(_Spec):
    """What is configured of anything that is served under a name, whatever file or option it came from.

    ``origin`` says where it was configured, for messages.  ``problems`` are faults of the settings: a servable that
    has any is known by name and fails to load with them, while everything else is served.  ``place`` is where it is
    written, if that is a file.  ``max_concurrency`` calls of it may be under way, 0 for any number, and ``max_queue``
    more wait.  ``placement`` is for clusters.  ``load_number`` grows when it is to be loaded again from the same
    settings.
    """

    kind: ClassVar[str]
    """What messages call it."""
    queues_itself: ClassVar[bool] = False
    """Whether calls wait in the service, also where any number may be under way."""

    name: str
    base_path: Path
    version_policy: VersionPolicy = LatestVersions()
    origin: str = ""
    problems: tuple[Problem, ...] = ()
    max_concurrency: Annotated[int, Field(ge=0)] = 0
    max_queue: Annotated[int, Field(ge=0)] = 100
    placement: PlacementSpec = PlacementSpec()
    load_number: int = 0
    place: Place | None = Field(default=None, exclude=True, repr=False)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems because of which it must not be loaded."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def placed(self, problem: Problem) -> Problem:
        """Give a problem of no file, or of the settings, the place where the settings are written, if that is known."""
        if problem.file not in ("", self.origin):
            return problem
        return replace(problem, file=self.origin) if self.place is None else self.place.of(problem)

    def needs_reload(self, other: ServableSpec) -> bool:
        """Tell whether loaded versions must be loaded again for ``other``, not for its policy, problems or limits."""
        return type(self) is not type(other) or self.loaded_settings() != other.loaded_settings()

    def loaded_settings(self) -> dict[str, Any]:
        """Give the settings of what is loaded."""
        not_loaded = ("version_policy", "origin", "problems", "max_concurrency", "max_queue", "placement")
        left_out: dict[str, Any] = dict.fromkeys(not_loaded, True)
        left_out["nodes"] = {"__all__": {"origin"}}
        return self.model_dump(exclude=left_out)


class ModelSpec(ServableSpec):
    """One model of the configuration.

    ``shapes`` and ``layouts`` map a tensor's (mapped) name to its setting; the key ``""`` is a setting written
    without a name, which is for the only input.  ``mean`` and ``scale`` hold one value or one a channel.
    ``shape_buckets`` are dimensions by the names that their user gave them.
    """

    kind: ClassVar[str] = "model"

    batch: BatchSpec | None = None
    batching: BatchingSpec | None = None
    shapes: dict[str, ShapeSpec] = {}
    shape_buckets: dict[str, BucketedDimension] = {}
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
    """How the Python code of a service is run.

    ``isolation`` is None where the server's own setting holds, and so is ``memory_limit`` (bytes a process, 0 for any).
    ``python`` is the interpreter of the processes, None for the server's; ``timeout_seconds`` is how long a call may
    take, 0 for any time.
    """

    isolation: Literal["none", "process"] | None = None
    python: Path | None = None
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    timeout_seconds: Annotated[float, Field(ge=0)] = 0
    memory_limit: Annotated[int, Field(ge=0)] | None = None


class GraphSpec(ServableSpec):
    """One graph of the configuration, which has the one version 1.

    ``base_path`` is the directory from which the paths in the graph's file lead on, ``graph_path`` that file itself
    (both absolute); ``subconfig`` is the file that configures further models for the graph, if there is one.
    ``cache_dir`` is where what is made once of files that nodes name is kept; None for the server's own place.
    """

    kind: ClassVar[str] = "graph"

    graph_path: Path
    cache_dir: Path | None = None
    subconfig: Path | None = None
    python: PythonSpec = PythonSpec()


class HandlerSpec(ServableSpec):
    """One handler project of the configuration, which has the one version 1.

    ``path`` is its folder, or its file, absolute; what the file says is read when the project is loaded.
    ``base_path`` is the folder in either case.
    """

    kind: ClassVar[str] = "handler"

    path: Path
    python: PythonSpec = PythonSpec()


class OpPipelineSpec(ServableSpec):
    """A pipeline of Ops, which has the one version 1.

    ``config`` is its ``config.yml``, in place of the one that the script names, and ``script`` the Python file that
    runs its service; both are absolute.  Without a script a running one has handed its service over.  ``base_path`` is
    the folder of the configuration.
    """

    kind: ClassVar[str] = "op pipeline"

    config: Path | None = None
    script: Path | None = None


class NodeInput(_Spec):
    """Where an input comes from: an item of a node, or of ``request``, whose items are the pipeline's inputs."""

    name: str
    node: str
    data_item: str


class NodeOutput(_Spec):
    """An output of a model or custom node, and the name by which other nodes refer to it."""

    data_item: str
    alias: str


class PipelineNode(_Spec):
    """One node of a pipeline: a call of a servable (``model_name``) or of a custom node (``library``), never both.

    ``version`` 0 means the default one at the time of the call.  ``demultiply_count`` splits every output along its
    first dimension, -1 whatever its size; None splits nothing.  ``origin`` says where the node is written.
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
    """One pipeline of the configuration, which has the one version 1.

    ``outputs`` name an item of a node for each output of the pipeline.  ``libraries`` maps the names of all configured
    custom node libraries to their paths, as far as the nodes use them; a library that is built in has its short name
    for a path.
    """

    kind: ClassVar[str] = "pipeline"

    inputs: tuple[str, ...]
    outputs: tuple[NodeInput, ...]
    nodes: tuple[PipelineNode, ...]
    demultiply_count: int | None = None
    libraries: dict[str, Path] = {}


class MetricsSpec(_Spec):
    """Which metric families are served; ``families`` None means the default set."""

    enable: bool = True
    families: tuple[str, ...] | None = None


class ServerSpec(_Spec):
    """A whole configuration, validated.

    ``services`` have a name of their own each.  ``problems`` are those that belong to none, warnings among them.
    ``further_files`` holds what was read besides the file itself, None for what was looked for and is not there: a
    change of one is a change of all.
    """

    services: tuple[ServableSpec, ...] = ()
    metrics: MetricsSpec | None = None
    problems: tuple[Problem, ...] = ()
    further_files: dict[Path, bytes | None] = {}

    def of(self, spec: type[SpecT]) -> tuple[SpecT, ...]:
        """Give what is to be served of one kind."""
        return tuple(each for each in self.services if isinstance(each, spec))


# ----------------------------------------------------------------------
# What a configuration says of a model that makes text, vectors or scores of texts
# ----------------------------------------------------------------------

PROMPT_LOOKUP: Final = "prompt_lookup"
"""What the library calls it in its properties."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Speed = Annotated[float, Field(gt=0, le=100)]


class TextModelSpec(ServableSpec):
    """One such model, which has the one version 1.

    Attributes:
        path: a folder as openvino-genai reads it, or a ``.gguf`` file; absolute.
        task: what it does.
        device: where it runs.
        plugin_config: properties of the device, and what the pipeline takes beside them, such as ``prompt_lookup``.
        cache_dir: where what is made of files once is kept; None for the server's own place.
        max_num_batched_tokens: how many tokens a step takes at most, which bounds its length.
        cache_size: how many GB (2**30 bytes) the cache of keys and values has; 0 for a quarter of the free memory.
        max_num_seqs: how many texts are made in one step at most.
        dynamic_split_fuse: whether a step takes parts of prompts and single tokens together.
        enable_prefix_caching: whether what prompts have in common is computed once.
        best_of_limit: how many beams, and texts, one request may ask for.
        max_tokens_limit: how many tokens an answer may have; None for as many as the context holds.
        tool_parser: what finds calls of tools in the text; empty for what its template tells, ``none`` for nothing.
        reasoning_parser: what finds reasoning in the text; likewise.
        enable_tool_guided_generation: whether calls of tools are made to fit their parameters' schemas.
        chat_template_mode: what renders chat templates, Jinja or the library's own (``MINJA``).
        pooling: which vectors of a text become its embedding.
        normalize: whether embeddings have the length 1.
        truncate: whether an input that is too long is cut, rather than refused.
        max_allowed_chunks: how many pieces of documents one call of a reranker may have.
        voices: files of speaker embeddings, by the names of those who speak so.
        speed_min: how slow a request may have a text spoken, 1 for as the voice does.
        speed_max: how fast.
        enable_word_timestamps: whether times of words are told of speech, which takes longer.
        max_queue: how many requests wait for room at most.
        kv_overcommit: how much of the cache is promised to requests, 1 for what there is.
        draft_path: a second, smaller model of the same vocabulary, as ``path``, that proposes tokens for the first to
            check; None for none.
        draft_device: where that runs; empty for where the first does.
        reload: whether a new version is loaded beside the old one (``swap``), or after that has given its memory back
            (``retire_first``); ``auto`` decides by the memory that is free.
        idle_unload_seconds: after how long without a request its memory is given back; 0 for never.
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
    pooling: Literal["CLS", "LAST", "MEAN"] = "CLS"
    normalize: bool = True
    truncate: bool = False
    max_allowed_chunks: Count = 10_000
    enable_word_timestamps: bool = False
    voices: dict[str, Path] = Field(default_factory=dict)
    speed_min: Speed = 0.25
    speed_max: Speed = 4.0
    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    kv_overcommit: Annotated[float, Field(gt=0, le=100)] = 1.0
    draft_path: Path | None = None
    draft_device: str = ""
    reload: Literal["auto", "swap", "retire_first"] = "auto"
    idle_unload_seconds: Annotated[float, Field(ge=0)] = 0

    def loaded_settings(self) -> dict[str, Any]:
        """Give the settings of what is loaded, the room for those that wait among them: whoever makes texts has it."""
        return {**super().loaded_settings(), "max_queue": self.max_queue}

    @property
    def looks_up(self) -> bool:
        """Whether the prompt proposes tokens for what comes, by which the library calls it."""
        return str(self.plugin_config.get(PROMPT_LOOKUP, "")).lower() in {"true", "1"}
