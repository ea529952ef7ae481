"""Explicit model control: loads and unloads services by name on request.

::

    configuration ──> catalogue ─┐
    load(name) ─────> requested ─┴─> Registry.apply, with all callees
    path of a LoRA adapter in a request ─> a configured model with the adapter, under the adapter's name
    files in a request ─> a temporary folder ─> a model of that name
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from ovmstrio.config.model_entries import parse_overrides
from ovmstrio.config.specs import LoraAdapter, ModelSpec, ServableSpec, TextModelSpec
from ovmstrio.config.text_entries import parse_adapter
from ovmstrio.core.errors import ConfigError, ModelFailure, NotFound, Problem
from ovmstrio.core.generation import Task
from ovmstrio.serving.fingerprints import tree_fingerprint
from ovmstrio.serving.records import ApplyResult
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.serving.registry import Registry

log = structlog.get_logger(__name__)

_ON_LOOP_CHARACTERS: Final = 2_048
"""Longer settings are parsed in a worker thread."""
_UNDO_SECONDS: Final = 30.0
"""Time limit of undoing a cancelled load; the registry finishes the undo later if a load takes longer."""
_ALL: Final = "*"
_FILE_PREFIX: Final = "file:"
_MAX_FILES: Final = 1_024
_MAX_PATH_PARTS: Final = 8
_MAX_NAME_BYTES: Final = 255
_FOLDER_PREFIX: Final = "ovmstrio-loaded-"


RequestedLoad = list[Any]
"""A name, its settings as JSON or None, and its files by ``file:<version>/<name>``; plain data."""


class _PreviousState(NamedTuple):
    """State before a change, for undo."""

    change: str
    requested: dict[str, ServableSpec]
    overridden: set[str]
    folders: dict[str, Path]
    configs: dict[str, str | None]


class ModelControl:
    """Decides which configured services are served; a context manager that owns the folders of uploaded models.

    Args:
        cache_dir: compiled-blob cache of uploaded models.
        initial_names: names to load at the first configuration; ``*`` for all.
        can_undo: keep the files of the previous state, so that the last change can be undone.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        cache_dir: Path | None = None,
        initial_names: Sequence[str] = (),
        can_undo: bool = False,
    ) -> None:
        self._registry = registry
        self._cache_dir = cache_dir
        self._first: Sequence[str] = initial_names
        self._catalogue: dict[str, ServableSpec] = {}
        self._requested: dict[str, ServableSpec] = {}
        self._overridden: set[str] = set()
        self._folders: dict[str, Path] = {}
        self._created_folders: set[Path] = set()
        self._marks: dict[str, str] = {}
        self._configs: dict[str, str | None] = {}
        self._adopted_loads: list[RequestedLoad] = []
        self._keeps_before = can_undo
        self._previous: _PreviousState | None = None
        self._discarded: list[Path] = []
        self._lock = trio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for folder in self._created_folders:
            _remove(folder)

    @property
    def names(self) -> list[str]:
        """All configured and uploaded names."""
        return sorted({*self._catalogue, *self._requested})

    async def apply(self, specs: Sequence[ServableSpec]) -> ApplyResult:
        """Apply a configuration: update loaded services, unload the ones that are no longer configured.

        Models loaded with settings or files of a request are unchanged.

        Raises:
            NotReady: the registry has stopped.
            NotFound: a name of ``first`` is not configured; nothing is loaded.
        """
        async with self._lock:
            catalogue: dict[str, ServableSpec] = {}
            for spec in specs:
                catalogue.setdefault(spec.name, spec)
            first, self._first = self._first, ()
            names = catalogue if _ALL in first else first
            missing = [name for name in names if name not in catalogue]
            if missing:
                raise NotFound(f"--load-model: nothing of that name is configured: {', '.join(missing)}")
            self._catalogue = catalogue
            kept = {name: spec for name, spec in self._requested.items() if name in self._overridden}
            numbers = {name: spec.load_number for name, spec in self._requested.items()}
            followed = {name: catalogue[name] for name in (*self._requested, *names) if name in catalogue}
            self._requested = {
                **{
                    name: spec.model_copy(update={"load_number": numbers.get(name, 0)})
                    for name, spec in followed.items()
                },
                **kept,
            }
            return await self._registry.apply(await self._with_callees(self._requested.values()))

    async def load(
        self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None, *, change: str = ""
    ) -> None:
        """Load a service with its callees; reload it if its settings or files have changed.

        Args:
            name: a configured name, or any with ``files``.
            config: settings of a model as JSON, replacing configured ones, or ``parent`` and ``path`` of an adapter.
            files: files of a model by ``file:<version>/<name>``; requires ``config``.
            change: id of this change for :meth:`undo`.

        Raises:
            ModelFailure: loading failed; the previously served version stays.
            NotReady: the registry has stopped.
        """
        async with self._lock:
            await self._begin_change(change)
            try:
                spec, folder = await self._spec_of(name, config, files or {})
                await self._load(name, spec, folder, is_override=config is not None)
                self._configs[name] = config
            except (ConfigError, NotFound) as error:
                message = f'failed to load "{cut(name, 80)}", failed to poll from model repository: {error.message}'
                raise ModelFailure(message) from None

    async def unload(self, name: str, *, with_callees: bool = False, change: str = "") -> None:
        """Unload a service; with ``with_callees`` also callees that no other loaded service calls.

        ``change`` is the id of this change for :meth:`undo`.

        Raises:
            NotFound: the name is unknown.
            NotReady: the registry has stopped.
        """
        async with self._lock:
            await self._begin_change(change)
            if name not in self.names:
                raise NotFound(f'failed to unload "{cut(name, 80)}": nothing of that name is configured')
            called: set[str] = set()
            if with_callees and name in self._requested:
                called = {spec.name for spec in await self._with_callees([self._requested[name]])}
            for each in {name, *called}:
                self._requested.pop(each, None)
                self._overridden.discard(each)
            await self._registry.apply(await self._with_callees(self._requested.values()))
            await self._remove_folder(name)

    # Several worker processes
    async def undo(self, change: str) -> None:
        """Restore the state before the last change, if that has this id and was not undone already."""
        async with self._lock:
            before = self._previous
            if before is not None and before.change == change:
                self._previous = None
                new = {folder for name, folder in self._folders.items() if before.folders.get(name) != folder}
                self._requested, self._overridden = before.requested, before.overridden
                self._folders, self._configs = before.folders, before.configs
                self._discarded = []
                await self._registry.apply(await self._with_callees(self._requested.values()))
                for folder in new:
                    await self._remove(folder)

    async def loads(self) -> list[RequestedLoad]:
        """Return all requested loads with their files, for :meth:`adopt` in another process."""
        async with self._lock:
            return [await self._load_of(name) for name in self._requested]

    async def _load_of(self, name: str) -> RequestedLoad:
        folder = self._folders.get(name)
        files = {} if folder is None else await trio.to_thread.run_sync(_files_of, folder)
        return [name, self._configs.get(name), files]

    def adopt(self, loads: Sequence[RequestedLoad]) -> None:
        """Set the loads to make at the first configuration, replacing ``first``."""
        self._first = [name for name, config, _ in loads if config is None]
        self._adopted_loads = [load for load in loads if load[1] is not None]

    async def load_adopted(self) -> None:
        """Load the adopted models that have settings or files of a request; failures are logged."""
        adopted, self._adopted_loads = self._adopted_loads, []
        for name, config, files in adopted:
            try:
                await self.load(name, config, files)
            except ModelFailure as error:
                log.error("peer model not loaded on this worker", name=name, reason=error.message)  # noqa: TRY400 - expected

    async def _begin_change(self, change: str) -> None:
        """Save the current state for :meth:`undo`."""
        if self._keeps_before:
            for folder in self._discarded:
                await self._remove(folder)
            self._discarded = []
            requested, overridden = dict(self._requested), set(self._overridden)
            self._previous = _PreviousState(change, requested, overridden, dict(self._folders), dict(self._configs))

    async def _spec_of(
        self, name: str, config: str | None, files: Mapping[str, bytes]
    ) -> tuple[ServableSpec, Path | None]:
        adapted = None if config is None or len(config) > _ON_LOOP_CHARACTERS else parse_adapter(name, config)
        if adapted is not None:
            return self._adapter_spec(*adapted, files), None
        fields: dict[str, Any] = {}
        ignored: list[str] = []
        if config is not None and len(config) <= _ON_LOOP_CHARACTERS:
            fields, ignored = parse_overrides(config)
        elif config is not None:
            fields, ignored = await trio.to_thread.run_sync(parse_overrides, config)
        if ignored:
            log.info("settings ignored", name=name, settings=ignored)
        if files:
            if config is None:
                raise _problem("files need a config, which may be {}", path="parameters.config")
            folder = await _write_files(files)
            self._created_folders.add(folder)
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

    def _adapter_spec(self, parent: str, adapter: LoraAdapter, files: Mapping[str, bytes]) -> ServableSpec:
        """Return a configured language model with an adapter, under the adapter's name."""
        model, known = self._catalogue.get(parent), self._catalogue.get(adapter.name)
        if files:
            raise _problem("an adapter is loaded from a path of the server, not from files", path="parameters")
        if not isinstance(model, TextModelSpec) or model.task is not Task.TEXT_GENERATION or model.parent:
            expected = "a configured model that generates text"
            raise _problem("no model for adapters", path="config.parent", expected=expected, found=cut(parent, 80))
        if known is not None and getattr(known, "parent", "") != parent:
            raise _problem(f"the name is configured for a {known.kind}", path="model")
        return model.with_adapter(adapter).model_copy(update={"origin": "a request", "place": None})

    async def _load(self, name: str, spec: ServableSpec, folder: Path | None, *, is_override: bool) -> None:
        before = self._requested.get(name)
        try:
            self._requested[name] = await self._with_load_number(spec)
            result = await self._registry.apply(await self._with_callees(self._requested.values()))
        except BaseException:
            # The registry continues a change whose caller was cancelled, so that the change is undone by another.
            with trio.move_on_after(_UNDO_SECONDS, shield=True):
                await self._restore(name, before, folder)
            raise
        failure = next((status.reason for status in result.failures if status.name == name), "")
        if not failure and not self._registry.available_versions(name):
            failure = "no version of it could be loaded"
        if failure:
            await self._restore(name, before, folder)
            raise ModelFailure(f'failed to load "{name}": {failure}')
        self._overridden.discard(name)
        if is_override:
            self._overridden.add(name)
        await self._remove_folder(name)
        if folder is not None:
            self._folders[name] = folder

    async def _with_load_number(self, spec: ServableSpec) -> ServableSpec:
        """Raise the load number of a spec whose files have changed since its last load."""
        kind = self._registry.kinds[spec.kind]
        try:
            fingerprint = await trio.to_thread.run_sync(
                lambda: tree_fingerprint(spec.base_path) + kind.fingerprint(spec, spec.base_path)
            )
        except OSError as error:
            raise ModelFailure(f'failed to load "{spec.name}": the files cannot be examined: {error}') from error
        loaded = self._requested.get(spec.name)
        number = 0 if loaded is None else loaded.load_number
        if self._marks.get(spec.name, fingerprint) != fingerprint:
            number += 1
        self._marks[spec.name] = fingerprint
        return spec.model_copy(update={"load_number": number})

    async def _restore(self, name: str, before: ServableSpec | None, folder: Path | None) -> None:
        if before is None:
            self._requested.pop(name, None)
        else:
            self._requested[name] = before
        try:
            await self._registry.apply(await self._with_callees(self._requested.values()))
        finally:
            await self._remove(folder)

    async def _with_callees(self, specs: Iterable[ServableSpec]) -> list[ServableSpec]:
        """Return services together with all their configured callees."""
        return await trio.to_thread.run_sync(self._add_callees, list(specs))

    def _add_callees(self, specs: list[ServableSpec]) -> list[ServableSpec]:
        found = {spec.name: spec for spec in specs}
        rest = list(specs)
        while rest:
            spec = rest.pop()
            kind = self._registry.kinds[spec.kind]
            for call in kind.depends_on(spec):
                callee = self._requested.get(call.name) or self._catalogue.get(call.name)
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
            self._created_folders.discard(folder)


def _problem(message: str, **details: Any) -> ConfigError:
    return ConfigError([Problem(message, **details)])


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


async def _write_files(files: Mapping[str, bytes]) -> Path:
    if len(files) > _MAX_FILES:
        raise _problem(f"expected at most {_MAX_FILES} files, got {len(files)}", path="parameters")
    paths = {_path_of(key): content for key, content in files.items()}
    return await trio.to_thread.run_sync(_write, paths)


def _path_of(key: str) -> PurePosixPath:
    name = key.removeprefix(_FILE_PREFIX)
    parts = name.split("/")
    wrong = any(part in {"", ".", ".."} or len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in parts)
    if wrong or "\0" in name or "\\" in name or len(parts) > _MAX_PATH_PARTS:
        expected = f"{_FILE_PREFIX}<version>/<name>, without '..' and with names of at most {_MAX_NAME_BYTES} bytes"
        raise _problem("the path of a file cannot be used", path="parameters", expected=expected, found=cut(key, 80))
    return PurePosixPath(name)


def _files_of(folder: Path) -> dict[str, bytes]:
    return {
        f"{_FILE_PREFIX}{file.relative_to(folder)}": read_regular_bytes(file, max_bytes=None)
        for file in folder.rglob("*")
        if file.is_file()
    }


def _write(files: Mapping[PurePosixPath, bytes]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
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
