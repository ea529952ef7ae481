"""All models of one project, kept as their storages are while a block lasts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from ovmstrio.repository.watcher import FileWatcher
from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.client import ModelClient, ModelNames
from ovmstrio.runtimes.handlers.models.fetching import StorageThreads
from ovmstrio.runtimes.handlers.models.loader import LoadModel, ModelLoader
from ovmstrio.runtimes.handlers.models.shelf import Shelf
from ovmstrio.runtimes.handlers.models.sources import CopyMaker, ModelSource, open_sources
from ovmstrio.runtimes.handlers.models.storage import OpenStorage, open_storage
from ovmstrio.runtimes.handlers.models.watching import StorageSync, Validate, WatchOptions
from ovmstrio.work.backoff import Backoff

__all__ = ["LibraryOptions", "ModelLibrary", "open_library"]


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """How models are kept.

    Attributes:
        watch: how their storages are followed.
        root: where copies are kept, in a new folder that is removed at the end; the system's temporary folder if None.
        open_storage: opens storages; None for those that a URL stands for.
    """

    watch: WatchOptions = field(default_factory=WatchOptions)
    root: Path | None = None
    open_storage: OpenStorage | None = None


class ModelLibrary:
    """The models of one project.

    Args:
        spec: which models.
        sources: where they come from.
        root: where copies of them are kept.
        validate: which versions can be used at all.
        watch: how the storages are followed.

    Attributes:
        shelf: what is here.
        storage_threads: fetch for those who ask.
        loader: gives that, and loads what is not.
        names: the names that may be asked for.
        client: for the handler.
        sync: takes over what the storages have.
        watcher: has it do so again and again.
        janitor: removes copies that are not needed any more.
    """

    def __init__(
        self, spec: ModelsSpec, sources: Sequence[ModelSource], root: Path, *, validate: Validate, watch: WatchOptions
    ) -> None:
        self.janitor = _Janitor()
        self.shelf = Shelf(spec.cache_size, spec.disk_cache_size, self.janitor.wake)
        maker = CopyMaker(root, sources)
        self.storage_threads = StorageThreads(maker, watch.fetches, spec.storage_timeout_seconds)
        self.loader = ModelLoader(self.shelf, maker, self.storage_threads)
        self.names = ModelNames(spec, self.shelf)
        self.client = ModelClient(self.shelf, self.loader, self.names, is_caching=spec.is_cached)
        self.sync = StorageSync(sources, self.shelf, maker, spec=spec, validate=validate, options=watch)
        self.watcher = FileWatcher(self.sync.look, watch.interval_seconds, Backoff())

    @property
    def is_stale(self) -> bool:
        """Whether the storages could not be read lately, so that models may be older than they should."""
        return self.sync.is_stale


@asynccontextmanager
async def open_library(
    spec: ModelsSpec,
    *,
    load_model: LoadModel | None = None,
    validate: Validate = lambda _: None,
    options: LibraryOptions | None = None,
) -> AsyncIterator[ModelLibrary]:
    """Keep the models of a project while the block lasts; it is entered after the first look at all storages.

    Args:
        spec: which models.
        load_model: how they are loaded; may be said later, with ``client.set_load_method``.
        validate: which versions can be used at all.
        options: how they are kept.

    Raises:
        ConfigError: a storage's library is not installed.
        ExceptionGroup: of what the block raises.

    Ownership: the task that follows the storages, and the copies of models on the local disk.

    Cancellation: at any checkpoint; the copies are removed.
    """
    options = options or LibraryOptions()
    sources = open_sources(
        spec, options.open_storage or partial(open_storage, stall_seconds=spec.storage_timeout_seconds)
    )
    with _new_folder(options.root) as root:
        async with trio.open_nursery() as nursery:
            library = ModelLibrary(spec, sources, root, validate=validate, watch=options.watch)
            library.loader.load_model = load_model
            nursery.start_soon(library.watcher.run)
            nursery.start_soon(library.janitor.run, library.loader)
            if spec.is_cached:
                nursery.start_soon(library.storage_threads.run)
            await library.sync.synced.wait()
            yield library
            nursery.cancel_scope.cancel()
        library.shelf.replace_catalog({})
        for storage in {id(source.storage): source.storage for source in sources}.values():
            storage.close()


@contextmanager
def _new_folder(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="ovmstrio-models-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Janitor:
    """Removes copies that nobody needs any more, soon after somebody has found them so."""

    def __init__(self) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        self._wanted = trio.Event()

    def wake(self) -> None:
        """Say that there is something to remove; from any thread."""
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._set, idempotent=True)

    def _set(self) -> None:
        self._wanted.set()

    async def run(self, loader: ModelLoader) -> None:
        """Remove copies until cancelled.

        Cancellation: at once; a thread that removes goes on.
        """
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await trio.to_thread.run_sync(loader.empty_trash, abandon_on_cancel=True)
