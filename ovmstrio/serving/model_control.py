"""Services that are loaded and unloaded by name, because somebody asks for it, and not because they are configured.

::

    configuration ──> catalogue ─┐
    load(name) ─────> wanted ────┴─> Registry.apply     with all that it calls
    files in a request ─> a folder of the server's ─> a model of that name
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from ovmstrio.config.model_entries import read_overrides
from ovmstrio.config.specs import ModelSpec, ServableSpec
from ovmstrio.core.errors import ConfigError, ModelFailure, NotFound, Problem
from ovmstrio.serving.fingerprints import tree_mark
from ovmstrio.serving.records import ApplyResult
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.serving.registry import Registry

__all__ = ["ModelControl"]

log = structlog.get_logger(__name__)

_AT_ONCE_CHARACTERS: Final = 2_048
"""Longer settings are read in a worker thread."""
_EVERYTHING: Final = "*"
_FILE: Final = "file:"
_MOST_FILES: Final = 1_024
_MOST_PARTS: Final = 8
_MOST_NAME_BYTES: Final = 255
_FOLDER: Final = "ovmstrio-loaded-"


LoadByName = list[Any]
"""A name, its settings as JSON or None, and its files by ``file:<version>/<name>``; plain data."""


class _Before(NamedTuple):
    """What was served by name before a change, and what that is known by."""

    change: str
    asked: dict[str, ServableSpec]
    overridden: set[str]
    folders: dict[str, Path]
    configs: dict[str, str | None]


class ModelControl:
    """Decides which of the services that are configured are served.

    Args:
        registry: what is served.
        cache_dir: where models that come as files keep what was compiled.
        first: the names that are loaded when the configuration is read for the first time; ``*`` for all.
        keeps_before: whether the last change can be undone, for which the files of what was served before are kept.

    Ownership: the folders of models that came as files, until the ``with`` block is left.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        cache_dir: Path | None = None,
        first: Sequence[str] = (),
        keeps_before: bool = False,
    ) -> None:
        self._registry = registry
        self._cache_dir = cache_dir
        self._first: Sequence[str] = first
        self._catalogue: dict[str, ServableSpec] = {}
        self._asked: dict[str, ServableSpec] = {}
        self._overridden: set[str] = set()
        self._folders: dict[str, Path] = {}
        self._made: set[Path] = set()
        self._marks: dict[str, str] = {}
        self._configs: dict[str, str | None] = {}
        self._adopted: list[LoadByName] = []
        self._keeps_before = keeps_before
        self._before: _Before | None = None
        self._discarded: list[Path] = []
        self._lock = trio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for folder in self._made:
            _remove(folder)

    @property
    def names(self) -> list[str]:
        """All that could be loaded, and what was loaded from files."""
        return sorted({*self._catalogue, *self._asked})

    async def apply(self, specs: Sequence[ServableSpec]) -> ApplyResult:
        """Take over a configuration: what is loaded follows it, and what is gone from it is unloaded.

        Models that were loaded with settings or files of their own stay as they are.

        Raises:
            NotReady: the registry has stopped.
            NotFound: something that is to be loaded first is not configured; nothing is loaded.

        Cancellation: as ``Registry.apply``.
        """
        async with self._lock:
            catalogue: dict[str, ServableSpec] = {}
            for spec in specs:
                catalogue.setdefault(spec.name, spec)
            first, self._first = self._first, ()
            names = catalogue if _EVERYTHING in first else first
            missing = [name for name in names if name not in catalogue]
            if missing:
                raise NotFound(f"--load_model: nothing of that name is configured: {', '.join(missing)}")
            self._catalogue = catalogue
            kept = {name: spec for name, spec in self._asked.items() if name in self._overridden}
            numbers = {name: spec.load_number for name, spec in self._asked.items()}
            followed = {name: catalogue[name] for name in (*self._asked, *names) if name in catalogue}
            self._asked = {
                **{
                    name: spec.model_copy(update={"load_number": numbers.get(name, 0)})
                    for name, spec in followed.items()
                },
                **kept,
            }
            return await self._registry.apply(await self._with_callees(self._asked.values()))

    async def load(
        self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None, *, change: str = ""
    ) -> None:
        """Load a service, and what it calls; one that is loaded follows its settings and files, if these changed.

        Args:
            name: that is configured, or any with ``files``.
            config: settings of a model, as JSON, in place of those that are configured.
            files: the files of a model by ``file:<version>/<name>``; ``config`` must be given, too.
            change: by what this is known to :meth:`undo`.

        Raises:
            ModelFailure: it cannot be loaded; what was served under the name goes on.
            NotReady: the registry has stopped.

        Cancellation: at once; the load itself goes on, owned by the registry.
        """
        async with self._lock:
            await self._begin_change(change)
            try:
                spec, folder = await self._spec_of(name, config, files or {})
                await self._load(name, spec, folder, is_override=config is not None)
                self._configs[name] = config
            except (ConfigError, NotFound) as error:
                said = f'failed to load "{cut(name, 80)}", failed to poll from model repository: {error.message}'
                raise ModelFailure(said) from None

    async def unload(self, name: str, *, with_callees: bool = False, change: str = "") -> None:
        """Stop serving a name; with ``with_callees`` also what it calls and nobody else that is loaded does.

        ``change`` is by what this is known to :meth:`undo`.

        Raises:
            NotFound: nothing of that name could be loaded.
            NotReady: the registry has stopped.

        Cancellation: at once; the registry goes on with it.
        """
        async with self._lock:
            await self._begin_change(change)
            if name not in self.names:
                raise NotFound(f'failed to unload "{cut(name, 80)}": nothing of that name is configured')
            called: set[str] = set()
            if with_callees and name in self._asked:
                called = {spec.name for spec in await self._with_callees([self._asked[name]])}
            for each in {name, *called}:
                self._asked.pop(each, None)
                self._overridden.discard(each)
            await self._registry.apply(await self._with_callees(self._asked.values()))
            await self._remove_folder(name)

    # A server of several processes

    async def undo(self, change: str) -> None:
        """Serve by name what was served before the last change, if it is this one, and has not been undone.

        Cancellation: at once; the registry goes on with it.
        """
        async with self._lock:
            before = self._before
            if before is not None and before.change == change:
                self._before = None
                new = {folder for name, folder in self._folders.items() if before.folders.get(name) != folder}
                self._asked, self._overridden = before.asked, before.overridden
                self._folders, self._configs = before.folders, before.configs
                self._discarded = []
                await self._registry.apply(await self._with_callees(self._asked.values()))
                for folder in new:
                    await self._remove(folder)

    async def loads(self) -> list[LoadByName]:
        """Tell what is loaded by name, so that another process can :meth:`adopt` it; files are read for that."""
        async with self._lock:
            return [await self._load_of(name) for name in self._asked]

    async def _load_of(self, name: str) -> LoadByName:
        folder = self._folders.get(name)
        files = {} if folder is None else await trio.to_thread.run_sync(_files_of, folder)
        return [name, self._configs.get(name), files]

    def adopt(self, loads: Sequence[LoadByName]) -> None:
        """Have these loaded when the configuration is read for the first time, and nothing else."""
        self._first = [name for name, config, _ in loads if config is None]
        self._adopted = [load for load in loads if load[1] is not None]

    async def load_adopted(self) -> None:
        """Load what another process had loaded with settings or files of its own; what fails is logged.

        Cancellation: as :meth:`load`.
        """
        adopted, self._adopted = self._adopted, []
        for name, config, files in adopted:
            try:
                await self.load(name, config, files)
            except ModelFailure as error:
                log.error("what others have loaded is not", name=name, reason=error.message)  # noqa: TRY400 - told

    async def _begin_change(self, change: str) -> None:
        """Have what is served now be what :meth:`undo` comes back to."""
        if self._keeps_before:
            for folder in self._discarded:
                await self._remove(folder)
            self._discarded = []
            asked, overridden = dict(self._asked), set(self._overridden)
            self._before = _Before(change, asked, overridden, dict(self._folders), dict(self._configs))

    # Inside

    async def _spec_of(
        self, name: str, config: str | None, files: Mapping[str, bytes]
    ) -> tuple[ServableSpec, Path | None]:
        fields: dict[str, Any] = {}
        passed_over: list[str] = []
        if config is not None and len(config) <= _AT_ONCE_CHARACTERS:
            fields, passed_over = read_overrides(config)
        elif config is not None:
            fields, passed_over = await trio.to_thread.run_sync(read_overrides, config)
        if passed_over:
            log.info("settings without effect", name=name, settings=passed_over)
        if files:
            if config is None:
                raise _problem("files need a config, which may be {}", path="parameters.config")
            folder = await _written(files)
            self._made.add(folder)
            spec = ModelSpec(name=name, base_path=folder, cache_dir=self._cache_dir, origin="a request", **fields)
            return spec, folder
        known = self._catalogue.get(name)
        if known is None:
            raise NotFound("nothing of that name is configured")
        if config is None:
            return known, None
        if not isinstance(known, ModelSpec):
            raise _problem(f"only models take settings, and this is a {known.kind}", path="parameters.config")
        return known.model_copy(update=fields), None

    async def _load(self, name: str, spec: ServableSpec, folder: Path | None, *, is_override: bool) -> None:
        before = self._asked.get(name)
        spec = await self._seen(spec)
        self._asked[name] = spec
        result = await self._registry.apply(await self._with_callees(self._asked.values()))
        failure = next((status.reason for status in result.failures if status.name == name), "")
        if not failure and not self._registry.available_versions(name):
            failure = "no version of it could be loaded"
        if failure:
            await self._take_back(name, before, folder)
            raise ModelFailure(f'failed to load "{name}": {failure}')
        self._overridden.discard(name)
        if is_override:
            self._overridden.add(name)
        await self._remove_folder(name)
        if folder is not None:
            self._folders[name] = folder

    async def _seen(self, spec: ServableSpec) -> ServableSpec:
        """Have files that changed since the last load of a name loaded again."""
        mark = await trio.to_thread.run_sync(tree_mark, spec.base_path)
        loaded = self._asked.get(spec.name)
        number = 0 if loaded is None else loaded.load_number
        if self._marks.get(spec.name, mark) != mark:
            number += 1
        self._marks[spec.name] = mark
        return spec.model_copy(update={"load_number": number})

    async def _take_back(self, name: str, before: ServableSpec | None, folder: Path | None) -> None:
        """Serve under a name what was served before."""
        if before is None:
            del self._asked[name]
        else:
            self._asked[name] = before
        await self._registry.apply(await self._with_callees(self._asked.values()))
        await self._remove(folder)

    async def _with_callees(self, specs: Iterable[ServableSpec]) -> list[ServableSpec]:
        """Give services together with all that they call, as far as it is configured."""
        return await trio.to_thread.run_sync(self._closed, list(specs))

    def _closed(self, specs: list[ServableSpec]) -> list[ServableSpec]:
        found = {spec.name: spec for spec in specs}
        rest = list(specs)
        while rest:
            spec = rest.pop()
            kind = self._registry.kinds[spec.kind]
            for call in kind.depends_on(spec):
                callee = self._asked.get(call.name) or self._catalogue.get(call.name)
                if callee is not None and call.name not in found:
                    found[call.name] = callee
                    rest.append(callee)
        return list(found.values())

    async def _remove_folder(self, name: str) -> None:
        folder = self._folders.pop(name, None)
        if self._keeps_before and folder is not None:
            self._discarded.append(folder)
        else:
            await self._remove(folder)

    async def _remove(self, folder: Path | None) -> None:
        if folder is not None:
            await trio.to_thread.run_sync(_remove, folder)
            self._made.discard(folder)


def _problem(message: str, **details: Any) -> ConfigError:
    return ConfigError([Problem(message, **details)])


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


async def _written(files: Mapping[str, bytes]) -> Path:
    """Write the files of a model into a folder of their own; the caller removes it."""
    if len(files) > _MOST_FILES:
        raise _problem(f"expected at most {_MOST_FILES} files, got {len(files)}", path="parameters")
    paths = {_path_of(key): content for key, content in files.items()}
    return await trio.to_thread.run_sync(_write, paths)


def _path_of(key: str) -> PurePosixPath:
    """Give where a file goes, which is below the model's folder."""
    name = key.removeprefix(_FILE)
    parts = name.split("/")
    wrong = any(part in {"", ".", ".."} or len(part.encode(errors="replace")) > _MOST_NAME_BYTES for part in parts)
    if wrong or "\0" in name or "\\" in name or len(parts) > _MOST_PARTS:
        expected = f"{_FILE}<version>/<name>, without '..' and with names of at most {_MOST_NAME_BYTES} bytes"
        raise _problem("the path of a file cannot be used", path="parameters", expected=expected, found=cut(key, 80))
    return PurePosixPath(name)


def _files_of(folder: Path) -> dict[str, bytes]:
    return {
        f"{_FILE}{file.relative_to(folder)}": read_regular_bytes(file, max_bytes=None)
        for file in folder.rglob("*")
        if file.is_file()
    }


def _write(files: Mapping[PurePosixPath, bytes]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | ValueError):
            raise _problem(f"the files cannot be written: {error}", path="parameters") from None
        raise
    return folder
