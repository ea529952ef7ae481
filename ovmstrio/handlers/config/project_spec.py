"""Validated specification of a handler project: absolute paths, defaults filled in, aliases resolved."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ovmstrio.config.located import Located
from ovmstrio.config.yaml_rules import InvalidValue, boolean, lenient, nonempty_str


def local_path(directory: Path, text: str) -> Path:
    """Return a path relative to a directory, without ``..``; links are not resolved, since they may change."""
    return Path(os.path.normpath(directory / text))


def is_file(path: Path) -> bool:
    """Return whether a file exists; False for paths that the system rejects."""
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Return whether a folder exists; False for paths that the system rejects."""
    with suppress(OSError):
        return path.is_dir()
    return False


def relative_path(node: Located) -> str:
    """Read a path below the project's folder."""
    text = nonempty_str(node)
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidValue("a path below the project's folder", message="only the project's folder is in the image")
    return text


DEFAULT_MODEL: Final = "_cortex_default"
"""Name of the only model of a project that specifies a ``path``."""

ProjectType = Literal["python", "tensorflow"]
LogLevel = Literal["debug", "info", "warning", "error"]
_Positive = Annotated[int, Field(ge=1)]
_Text = Annotated[str, nonempty_str]
_Inside = Annotated[str, relative_path]


class _FrozenSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ModelEntry(_FrozenSpec):
    """Model with an absolute local path or a storage URL (``s3://bucket/prefix``).

    ``signature_key`` is that of the entry, else that of its section.
    """

    name: _Text
    path: _Text
    signature_key: Annotated[str | None, nonempty_str] = None


class ModelsSpec(_FrozenSpec):
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
    signature_key: str | None = None
    cache_size: _Positive | None = None
    disk_cache_size: _Positive | None = None
    latest_versions: _Positive | None = None
    reload_interval_seconds: Annotated[float, Field(gt=0)] = 10.0
    storage_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0

    @property
    def is_cached(self) -> bool:
        """Whether models are loaded on demand and evicted."""
        return self.cache_size is not None


class ProjectBatching(_FrozenSpec):
    """Server-side batching.

    Attributes:
        interval_seconds: maximum time that the first request of a batch waits.
        retry_singly: whether the requests of a failed batch are retried one by one.
    """

    max_batch_size: _Positive
    interval_seconds: Annotated[float, Field(gt=0)]
    retry_singly: bool = False


class GpuVersion(_FrozenSpec):
    """CUDA image of a GPU project."""

    cuda: _Text
    cudnn: _Text
    development_image: Annotated[bool, lenient(boolean)] = False


class Dependencies(_FrozenSpec):
    """Dependency files, relative to the project's folder; all are optional."""

    pip: _Inside = "requirements.txt"
    conda: _Inside = "conda-packages.txt"
    shell: _Inside = "dependencies.sh"


class ImageSpec(_FrozenSpec):
    """Settings for container images only; ``keys`` are the configured keys in order."""

    keys: tuple[str, ...] = ()
    py_version: str = "3.6.9"
    tfs_version: str = "2.3.0"
    gpu: bool = False
    gpu_version: GpuVersion | None = None
    dependencies: Dependencies = Dependencies()
    use_local_cortex_libs: bool = False


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
    serve_port: Annotated[int, Field(ge=1, le=65535)] = 8080
    env: dict[str, str] = {}
    dotenv: dict[str, str] = {}
    config: dict[str, Any] = {}
    python_path: Path
    handler_path: Path
    protobuf_path: Path | None = None
    models: ModelsSpec | None = None
    processes: _Positive = 1
    threads_per_process: _Positive = 1
    max_concurrency: Annotated[int, Field(ge=0)] = 0
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
