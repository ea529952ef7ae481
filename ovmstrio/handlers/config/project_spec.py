"""Validated specification of a handler project: absolute paths, defaults filled in, aliases resolved."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ovmstrio.config.documents import InvalidValue, Located
from ovmstrio.config.schema import Key, NoEffect, ReadBy, lower_case, unquoted


def local_path(directory: Path, text: str) -> Path:
    """Return a path relative to a directory, without ``..``; links are not resolved, since they may change."""
    return Path(os.path.normpath(directory / text))


def source_text(node: Located) -> str:
    """Return the source text of a scalar, such as ``3.10`` for a version."""
    text = node.text.strip()
    if isinstance(node.value, dict | list) or not text or "\0" in text:
        raise InvalidValue("a text that is not empty")
    return text


def relative_path(node: Located) -> str:
    """Read a path below the project's folder."""
    text = source_text(node)
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidValue("a path below the project's folder", message="only the project's folder is in the image")
    return text


DEFAULT_MODEL: Final = "_cortex_default"
"""Name of the only model of a project that specifies a ``path``."""

Text = Annotated[str, ReadBy(source_text)]
_Inside = Annotated[str, ReadBy(relative_path)]
_UNQUOTED: Final = BeforeValidator(unquoted)
Flag = Annotated[bool, _UNQUOTED]
Positive = Annotated[int, _UNQUOTED, Field(ge=1)]
Seconds = Annotated[float, _UNQUOTED, Field(gt=0)]
Port = Annotated[int, _UNQUOTED, Field(ge=1, le=65_535)]
Limit = Annotated[int, _UNQUOTED, Field(ge=0)]
ProjectType = Annotated[Literal["python", "tensorflow"], BeforeValidator(lower_case)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower_case)]


class _FrozenSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)


class ModelEntry(_FrozenSpec):
    """Model with an absolute local path or a storage URL (``s3://bucket/prefix``).

    ``signature_key`` is that of the entry, else that of its section.
    """

    name: Text
    path: Text
    signature_key: Text | None = None


class ModelSettings(_FrozenSpec):
    """Settings of all models of a project; see :class:`ModelsSpec`."""

    signature_key: Text | None = None
    cache_size: Positive | None = None
    disk_cache_size: Positive | None = None
    latest_versions: Positive | None = None
    reload_interval_seconds: Seconds = 10.0
    storage_timeout_seconds: Seconds = 60.0


class ModelsSpec(ModelSettings):
    """Models of a project, configured in ``section`` (``models`` or ``multi_model_reloading``).

    Attributes:
        entries: one model named :data:`DEFAULT_MODEL` for kind ``path``, all models for ``paths``, none for ``dir``.
        dir: folder whose direct subfolders are models, for kind ``dir``.
        cache_size: maximum number of versions in memory; None to load all models at start.
        disk_cache_size: maximum number of versions on disk; set if and only if ``cache_size`` is.
        latest_versions: number of versions of each model; None for all.
        reload_interval_seconds: interval between synchronizations with the storage.
        storage_timeout_seconds: maximum time without data from a storage.
    """

    section: str
    kind: Literal["path", "paths", "dir"]
    entries: tuple[ModelEntry, ...] = ()
    dir: str = ""

    @property
    def is_cached(self) -> bool:
        """True if models are loaded on demand and evicted."""
        return self.cache_size is not None


class ProjectBatching(_FrozenSpec):
    """Server-side batching.

    Attributes:
        interval_seconds: maximum time that the first request of a batch waits.
        retry_singly: whether the requests of a failed batch are retried one by one.
    """

    max_batch_size: Positive
    interval_seconds: Annotated[float, _UNQUOTED, Field(gt=0), Key("batch_interval_seconds")]
    retry_singly: Flag = False


class GpuVersion(_FrozenSpec):
    """CUDA image of a GPU project."""

    cuda: Text
    cudnn: Text
    development_image: Flag = False


class Dependencies(_FrozenSpec):
    """Dependency files, relative to the project's folder; all are optional."""

    pip: _Inside = "requirements.txt"
    conda: _Inside = "conda-packages.txt"
    shell: _Inside = "dependencies.sh"


NO_SERVING: Final = "the server runs SavedModels itself, without TensorFlow Serving"


class ImageSpec(_FrozenSpec):
    """Settings for container images only; ``keys`` are the configured keys in order."""

    keys: Annotated[tuple[str, ...], Key()] = ()
    py_version: Annotated[Text, NoEffect("handlers run in the server's Python")] = "3.6.9"
    tfs_version: Annotated[Text, NoEffect(NO_SERVING)] = "2.3.0"
    gpu: Annotated[Flag, NoEffect("serving uses the devices of the machine")] = False
    gpu_version: Annotated[GpuVersion | None, NoEffect("serving uses the CUDA version of the machine")] = None
    dependencies: Annotated[Dependencies, NoEffect("dependencies must be installed in the server's environment")] = (
        Dependencies()
    )
    use_local_cortex_libs: Annotated[Flag, NoEffect("serving uses the running server")] = False


class ProjectSpec(_FrozenSpec):
    """Validated handler project.

    Attributes:
        name: name of the project's folder, or the name in ``handler_config_list``.
        directory: folder of ``file``; the working directory if the handler is the only service.
        type: selects the client passed to the constructor.
        dotenv: variables of the folder's ``.env``; override ``env``.
        config: constructor argument ``config``; copied for each constructor call.
        python_path: additional import folder; the project's folder by default.
        protobuf_path: ``.proto`` of the gRPC service; None for HTTP.
        processes: number of worker processes with one handler each.
        threads_per_process: concurrent calls of a handler in each process.
        max_concurrency: maximum number of concurrent requests of all processes; 0 for no limit.
        tfs_container_dns: ignored: models run in the server instead of TensorFlow Serving.
    """

    name: str
    directory: Path
    file: Path
    type: ProjectType
    serve_port: Port = 8080
    env: dict[str, str] = {}
    dotenv: dict[str, str] = {}
    config: dict[Any, Any] = {}
    python_path: Path
    handler_path: Path
    protobuf_path: Path | None = None
    models: ModelsSpec | None = None
    processes: Positive = 1
    threads_per_process: Positive = 1
    max_concurrency: Limit = 0
    batching: ProjectBatching | None = None
    tfs_container_dns: str | None = None
    log_level: LogLevel = "info"
    image: ImageSpec = ImageSpec()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of ``env`` and ``.env``."""
        return self.env | self.dotenv

    @property
    def protocol(self) -> Literal["http", "grpc"]:
        """Protocol of the project's calls."""
        return "http" if self.protobuf_path is None else "grpc"
