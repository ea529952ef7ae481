"""All models of one project, kept as their storages are while a block lasts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.client import ModelClient, ModelNames
from ovmstrio.runtimes.handlers.models.copies import CopyMaker
from ovmstrio.runtimes.handlers.models.loader import LoadModel, ModelLoader
from ovmstrio.runtimes.handlers.models.shelf import Shelf
from ovmstrio.runtimes.handlers.models.sources import open_sources
from ovmstrio.runtimes.handlers.models.storage import OpenStorage, open_storage
from ovmstrio.runtimes.handlers.models.tree import ModelKey
from ovmstrio.runtimes.handlers.models.usage import UsagePolicy
from ovmstrio.runtimes.handlers.models.watching import Validate, Watcher, WatchOptions

__all__ = ["LibraryOptions", "ModelLibrary", "open_library"]


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """How models are kept.

    Attributes:
        watch: how their storages are followed.
        root: where copies are kept, in a new folder that is removed at the end; the system's temporary folder if None.
        open_storage: opens storages.
    """

    watch: WatchOptions = field(default_factory=WatchOptions)
    root: Path | None = None
    open_storage: OpenStorage = open_storage


class ModelLibrary:
    """The models of one project; ``client`` is for the handler.

    Args:
        shelf: what is here.
        loader: loads what is not.
        names: the names that may be asked for.
        watcher: follows the storages.
        is_caching: whether models come and go by their use.
    """

    def __init__(
        self, shelf: Shelf, loader: ModelLoader, names: ModelNames, watcher: Watcher, *, is_caching: bool
    ) -> None:
        self.client = ModelClient(shelf, loader, names, is_caching=is_caching)
        self.loader = loader
        self.names = names
        self.watcher = watcher
        self.shelf = shelf

    @property
    def is_stale(self) -> bool:
        """Whether the storages could not be read lately, so that models may be older than they should."""
        return self.watcher.is_stale

    async def wait_first_sync(self) -> None:
        """Wait until everything that the storages have can be asked for.

        Cancellation: at once.
        """
        await self.watcher.synced.wait()


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
    sources = open_sources(spec, options.open_storage)
    with _new_folder(options.root) as root:
        async with trio.open_nursery() as nursery:
            janitor = _Janitor()
            shelf = Shelf(UsagePolicy[ModelKey](spec.cache_size, spec.disk_cache_size), janitor.wake)
            maker = CopyMaker(root)
            loader = ModelLoader(shelf, maker, sources)
            loader.load_model = load_model
            watcher = Watcher(
                sources,
                shelf,
                maker,
                validate=validate,
                is_cached=spec.is_cached,
                latest=spec.latest_versions,
                options=options.watch,
            )
            names = ModelNames(spec.kind, frozenset(entry.name for entry in spec.entries), shelf)
            library = ModelLibrary(shelf, loader, names, watcher, is_caching=spec.is_cached)
            nursery.start_soon(watcher.run)
            nursery.start_soon(janitor.run, loader)
            await library.wait_first_sync()
            yield library
            nursery.cancel_scope.cancel()
        shelf.clear()
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
