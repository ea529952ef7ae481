"""Folders of models for handlers, and model libraries on a clock that the test advances."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.core.tracing import StartRootSpan
from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL, ModelEntry, ModelsSpec
from ovmstrio.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.stores.storage import LocalStorage, ModelStorage, OnProgress, StoredFile

TEXT_MODELS = """
from pathlib import Path
class Handler:
    def __init__(self, model_client):
        self.client = model_client
    def load_model(self, model_path):
        return Path(model_path, "model.txt").read_text()
    def handle_post(self, payload):
        return self.client.get_model(payload)
    async def handle_put(self, payload):
        return await self.client.aget_model(payload)
"""
"""A handler whose models are the texts that :func:`write_model` writes; both methods return the model of a name."""


def write_model(root: Path, text: str, *parts: str) -> Path:
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.txt").write_text(text)
    return folder


def one_model(path: Path | str) -> ModelsSpec:
    return ModelsSpec(section="models", kind="path", entries=(ModelEntry(name=DEFAULT_MODEL, path=str(path)),))


def several_models(paths: Mapping[str, Path | str]) -> ModelsSpec:
    entries = tuple(ModelEntry(name=name, path=str(path)) for name, path in paths.items())
    return ModelsSpec(section="models", kind="paths", entries=entries)


def models_in(path: Path | str, cache_size: int | None = None, disk_cache_size: int | None = None) -> ModelsSpec:
    return ModelsSpec(
        section="models", kind="dir", dir=str(path), cache_size=cache_size, disk_cache_size=disk_cache_size
    )


class Model:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = (folder / "model.txt").read_text()
        if "broken" in self.text:
            raise ValueError("this model is broken")


@dataclass
class Loads:
    folders: list[Path] = field(default_factory=list)

    def __call__(self, model_path: str) -> Model:
        self.folders.append(Path(model_path))
        return Model(Path(model_path))

    @property
    def versions(self) -> list[str]:
        return ["/".join(folder.parts[-2:]) for folder in self.folders]


class CountingStorage:
    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.failure: Exception | None = None
        self.closed = 0
        self._inner: ModelStorage = LocalStorage()

    def open(self, location: str) -> ModelStorage:
        return self

    def list_files(self, location: str) -> list[StoredFile]:
        if self.failure is not None:
            raise self.failure
        return self._inner.list_files(location)

    def fetch(self, file: StoredFile, target: Path, moved: OnProgress) -> None:
        if self.failure is not None:
            raise self.failure
        self.fetched.append(file.location)
        self._inner.fetch(file, target, moved)

    def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def library_over(
    spec: ModelsSpec,
    root: Path,
    load_model: Callable[[str], Any],
    storage: CountingStorage | None = None,
    *,
    start_root_span: StartRootSpan | None = None,
    **more: Any,
) -> AsyncIterator[ModelLibrary]:
    open_storage = None if storage is None else storage.open
    options = LibraryOptions(root=root, open_storage=open_storage, start_root_span=start_root_span)
    async with open_library(spec, load_model=load_model, options=options, **more) as library:
        yield library


async def next_look(library: ModelLibrary, clock: MockClock, seconds: float = 10.0) -> None:
    """Advance the clock to the next look at the storages, and wait for its end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(library.watcher.wait_check)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(seconds)


def paths_below(root: Path, pattern: str) -> set[Path]:
    """List paths below a folder during their removal, where ``Path.glob`` fails."""
    return {root / path for path in glob(pattern, root_dir=root)}  # noqa: PTH207 - see above


async def wait_removed(root: Path, pattern: str) -> None:
    """Wait until no path below a folder matches; files are removed asynchronously."""
    while await trio.to_thread.run_sync(paths_below, root, pattern):
        await trio.lowlevel.checkpoint()
