"""What a validated project says: values that everything which runs, checks or packs the project works with.

Nothing beside :mod:`ovmstrio.handlers.config` sees the user's spelling.  Paths are absolute, defaults are
filled in, and aliases of keys have become the one meaning that they have.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ovmstrio.config.documents import Located
from ovmstrio.config.sections import Unusable, any_spelling, flag, written

__all__ = [
    "DEFAULT_MODEL",
    "Dependencies",
    "GpuVersion",
    "ImageSpec",
    "LogLevel",
    "ModelEntry",
    "ModelsSpec",
    "ProjectBatching",
    "ProjectSpec",
    "ProjectType",
    "is_file",
    "is_folder",
    "local_path",
]


def local_path(directory: Path, text: str) -> Path:
    """Give the path that leads on from a directory, without ``..``; links stay, for they may lead elsewhere later."""
    return Path(os.path.normpath(directory / text))


def is_file(path: Path) -> bool:
    """Tell whether there is a file that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_dir()
    return False


def path_inside(node: Located) -> str:
    """Take a path that leads nowhere but into the project's folder."""
    text = written(node)
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise Unusable("a path below the project's folder", message="only the project's folder is in the image")
    return text


DEFAULT_MODEL: Final = "_cortex_default"
"""The name of the only model of a project that gives a ``path`` instead of names."""

ProjectType = Literal["python", "tensorflow"]
LogLevel = Literal["debug", "info", "warning", "error"]
_Positive = Annotated[int, Field(ge=1)]
_Text = Annotated[str, written]
_Inside = Annotated[str, path_inside]


class _FrozenSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ModelEntry(_FrozenSpec):
    """A model and where it lies: an absolute local path, or a URL of a storage (``s3://bucket/prefix``).

    ``signature_key`` is the one that counts for this model, whether its entry or its section gives it.
    """

    name: _Text
    path: _Text
    signature_key: Annotated[str | None, written] = None


class ModelsSpec(_FrozenSpec):
    """The models of a project; ``section`` is the key that has them (``models`` or ``multi_model_reloading``).

    ``entries`` is one model named :data:`DEFAULT_MODEL` for the kind ``path``, all that are listed for ``paths``,
    and empty for ``dir``, where every folder directly below ``dir`` is a model.  The cache sizes count versions of
    models; both are given (models are cached, and loaded when they are asked for) or none is.  Of each model there are
    the ``latest_versions``, so many of them, or all.  What changes is looked for every ``reload_interval_seconds``.
    A storage that gives nothing for ``storage_timeout_seconds`` has failed.
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
        """Whether models come and go by their use instead of all being there."""
        return self.cache_size is not None


class ProjectBatching(_FrozenSpec):
    """Server-side batching.

    Attributes:
        max_batch_size: how many requests at most are one call.
        interval_seconds: how long the first of them waits for others.
        retry_singly: whether the requests of a call that failed are tried again, one by one.
    """

    max_batch_size: _Positive
    interval_seconds: Annotated[float, Field(gt=0)]
    retry_singly: bool = False


class GpuVersion(_FrozenSpec):
    """Which CUDA image a GPU project is built on."""

    cuda: _Text
    cudnn: _Text
    development_image: Annotated[bool, any_spelling(flag)] = False


class Dependencies(_FrozenSpec):
    """The files that say what to install, relative to the project's folder; none of them need exist."""

    pip: _Inside = "requirements.txt"
    conda: _Inside = "conda-packages.txt"
    shell: _Inside = "dependencies.sh"


class ImageSpec(_FrozenSpec):
    """What only matters in an image; ``keys`` are those of its keys that the file has, in their order."""

    keys: tuple[str, ...] = ()
    py_version: str = "3.6.9"
    tfs_version: str = "2.3.0"
    gpu: bool = False
    gpu_version: GpuVersion | None = None
    dependencies: Dependencies = Dependencies()
    use_local_cortex_libs: bool = False


class ProjectSpec(_FrozenSpec):
    """A whole project, validated.

    Attributes:
        name: of the project's folder, or what ``handler_config_list`` calls it.
        directory: the folder that holds ``file``; the working directory where a project is served alone.
        file: the ``nucleus.yaml``.
        type: which client the handler's constructor gets.
        serve_port: the port of the server.
        env: what the file exports, as strings.
        dotenv: what the folder's ``.env`` exports, which counts more than ``env``.
        config: the constructor's ``config``; copy it deeply for each constructor.
        python_path: what is added to the places to import from; the project's folder if nothing is said.
        handler_path: the file with the class ``Handler``.
        protobuf_path: the ``.proto`` of the service; None for HTTP.
        models: the models that the server keeps for the handler.
        processes: how many processes have a handler each.
        threads_per_process: how many calls of a handler run at once in each.
        max_concurrency: how many requests may be in flight in all of them; 0 for no limit.
        batching: how requests are gathered to one call.
        tfs_container_dns: where TensorFlow Serving would be; without effect, because models run in the server.
        log_level: of what the server and the handler's logger say.
        image: what only matters in an image.
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
        """What the handler finds in its environment because of ``env`` and ``.env``."""
        return self.env | self.dotenv

    @property
    def protocol(self) -> Literal["http", "grpc"]:
        """How the project is called."""
        return "http" if self.protobuf_path is None else "grpc"
