"""Whether a configuration would serve: everything is read and loaded, nothing is served, every problem is told.

::

    config.json ─┬> models ─> versions on disk ─> model file, mapping ─> load, unload
                 ├> graphs ─> graph file, contracts, wiring ───────────> load, unload
                 ├> pipelines ─> nodes against the models they call ───> load, unload
                └> handlers ──> project file ─────────────────────────> import, in a process of its own
                         └──────────────── problems of each step, by file and line
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

import trio

from ovmstrio.config.graph_entries import is_graph
from ovmstrio.config.json_locations import Located
from ovmstrio.config.mapping import read_mapping
from ovmstrio.config.model_entries import Place
from ovmstrio.config.ovms_json import Examined, examine_config
from ovmstrio.config.specs import (
    AllVersions,
    GraphSpec,
    HandlerSpec,
    ModelSpec,
    PipelineSpec,
    ServableSpec,
    ServerSpec,
    SpecificVersions,
)
from ovmstrio.core.errors import ConfigError, NotFound, Problem, ServerError
from ovmstrio.core.servable import Servable
from ovmstrio.repository.versions import Listing, find_model_file, scan
from ovmstrio.runtimes.handlers.config.project_file import find_project_file, read_project
from ovmstrio.runtimes.handlers.trial import try_handler
from ovmstrio.runtimes.models import load_model
from ovmstrio.server.command_line import single_servable
from ovmstrio.server.settings import ServeSettings

__all__ = ["CheckReport", "LoadedVersion", "check_config", "check_pipelines"]

_CONFIG_NAME: Final = "config.json"


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version of a model, pipeline or graph that was loaded, and unloaded again; of a handler that was imported."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What would happen: the versions that load, ordered by model, and the problems, ordered by file and line."""

    loaded: tuple[LoadedVersion, ...]
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems because of which something would not be served."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems in spite of which everything would be served that can be."""
        return tuple(problem for problem in self.problems if problem.severity != "error")


async def check_config(path: Path, *, imports: bool = True) -> CheckReport:
    """Check a configuration file, a model's directory with all its versions, a graph's, or a handler's project.

    Args:
        path: the file or directory.
        imports: whether handlers are imported, in a process of their own.

    Owns what it loads: each is unloaded before this returns.  Raises nothing for what is wrong with the
    files; that is the report.

    Cancellation: at any checkpoint; a load that has begun is dropped.
    """
    check = _Check(imports)
    if project := await trio.to_thread.run_sync(find_project_file, path):
        await check.project(project)
    elif await trio.Path(path).is_dir():
        await check.directory(path)
    else:
        await check.file(path)
    return check.report()


async def check_pipelines(path: Path, names: Collection[str] = (), *, load: bool = True) -> CheckReport:
    """Check the pipelines of a configuration file, or those named, and what they call; nothing else.

    Without ``load`` nothing is opened besides the file: what can be said then is told.  Owns what it loads: each is
    unloaded before this returns.  Raises nothing for what is wrong with the files; that is the report.

    Cancellation: at any checkpoint; a load that has begun is dropped.
    """
    check = _Check(imports=False)
    examined = await check.read(path)
    if examined is not None:
        spec = _with_pipelines_only(examined.spec, names)
        if load:
            await check.all(spec, str(path), examined.places)
        else:
            from ovmstrio.runtimes.pipelines.examining import examine_pipeline  # noqa: PLC0415

            configured = [servable.name for servable in examined.spec.servables]
            for pipeline in spec.pipelines:
                check.add(*examine_pipeline(pipeline, configured))
    return check.report()


def _with_pipelines_only(spec: ServerSpec, names: Collection[str]) -> ServerSpec:
    pipelines = tuple(pipeline for pipeline in spec.pipelines if not names or pipeline.name in names)
    wanted = {pipeline.name for pipeline in pipelines}
    while more := _called_by(each for each in spec.pipelines if each.name in wanted) - wanted:
        wanted |= more
    kinds = {"pipelines": spec.pipelines, "models": spec.models, "graphs": spec.graphs}
    kept = {kind: tuple(each for each in specs if each.name in wanted) for kind, specs in kinds.items()}
    return spec.model_copy(update=kept)


def _called_by(pipelines: Iterable[PipelineSpec]) -> set[str]:
    return {node.model_name for pipeline in pipelines for node in pipeline.nodes if node.model_name}


def _callees_first(pipelines: Iterable[PipelineSpec]) -> list[PipelineSpec]:
    """Order pipelines by who calls whom; those that call each other come as they are configured."""
    by_name = {pipeline.name: pipeline for pipeline in pipelines}
    calls = {name: _called_by([pipeline]) & (by_name.keys() - {name}) for name, pipeline in by_name.items()}
    try:
        return [by_name[name] for name in TopologicalSorter(calls).static_order()]
    except CycleError:
        return list(by_name.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model is configured."""

    file: str
    settings: Located | None = None

    @property
    def names_base_path(self) -> bool:
        """Whether the settings say where the model lies; those of a broken file may not."""
        return self.settings is None or isinstance(self.settings.find("base_path").value, str)

    def of(self, problem: Problem) -> Problem:
        """Point a problem of an option, or of no file, at where the option is written."""
        if self.settings is None:
            return replace(problem, file=self.file)
        at = self.settings.find(*problem.path.split("."))
        return replace(problem, file=self.file, line=at.line, path=at.path)


@dataclass(frozen=True, slots=True)
class _Kept(AbstractContextManager["_Kept"]):
    """A loaded version as those who call it see it: like a lease of the registry's, of what stays open anyway."""

    name: str
    version: str
    servable: Servable
    is_only: bool
    """Whether it answers whatever version is asked for."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hold nothing."""


@dataclass(slots=True)
class _Check:
    imports: bool
    loaded: list[LoadedVersion] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)
    _called: frozenset[str] = frozenset()
    _kept: list[_Kept] = field(default_factory=list)

    def add(self, *problems: Problem) -> None:
        self._problems.extend(problems)

    def report(self) -> CheckReport:
        loaded = sorted(self.loaded, key=lambda version: (version.model, version.version))
        # Models that share a directory meet the same problems in it.
        problems = sorted(dict.fromkeys(self._problems), key=lambda problem: (problem.file, problem.line or 0))
        return CheckReport(tuple(loaded), tuple(problems))

    async def directory(self, path: Path) -> None:
        """Check a graph, or every version of a model, without a configuration; one of many is checked by its own."""
        base_path = Path(await trio.Path(path).resolve())
        configured = await trio.Path(path / _CONFIG_NAME).is_file()
        if await trio.to_thread.run_sync(is_graph, {"base_path": str(base_path)}, base_path):
            if configured:
                await self.file(path / _CONFIG_NAME)
            else:
                await self._alone(base_path, path)
        elif await trio.to_thread.run_sync(_versions, base_path):
            spec = ModelSpec(name=base_path.name, base_path=base_path, version_policy=AllVersions())
            await self.all(ServerSpec(models=(spec,)), str(path), {})
        elif configured:
            await self.file(path / _CONFIG_NAME)
        else:
            expected = f"a version's directory such as {path / '1'}, or a graph.pbtxt"
            hint = f"did you mean {base_path.parent}?" if base_path.name.isdecimal() else ""
            self.add(Problem("no version of a model and no graph found", str(path), expected=expected, suggestion=hint))

    async def _alone(self, base_path: Path, path: Path) -> None:
        settings = ServeSettings(model_name=base_path.name, model_path=base_path)
        spec = await trio.to_thread.run_sync(single_servable, settings)
        self.add(*spec.problems)
        await self.all(spec, str(path), {})

    async def file(self, path: Path) -> None:
        """Check a configuration file and all that it names."""
        examined = await self.read(path)
        if examined is not None:
            await self.all(examined.spec, str(path), examined.places)

    async def read(self, path: Path) -> Examined | None:
        """Give what a configuration file says, if that can be understood."""
        try:
            content = await trio.Path(path).read_bytes()
            examined = examine_config(content, path)
        except OSError as error:
            self.add(Problem(f"the configuration cannot be read: {error.strerror or error}", str(path)))
        except ConfigError as error:
            self.add(*error.problems)
        else:
            self.add(*examined.fatal, *examined.spec.problems)
            return examined
        return None

    async def all(self, spec: ServerSpec, file: str, places: Mapping[str, Place]) -> None:
        """Check everything that is to be served, pipelines after what they call."""
        self._called = frozenset(_called_by(spec.pipelines))
        async with trio.open_nursery() as tasks:
            try:
                async with trio.open_nursery() as nursery:
                    for model in spec.models:
                        nursery.start_soon(self.model, model, _place(file, places.get(model.name)), tasks)
                    for graph in spec.graphs:
                        nursery.start_soon(self.graph, graph, _place(file, places.get(graph.name)), tasks)
                    for handler in spec.handlers:
                        nursery.start_soon(self.handler, handler, _place(file, places.get(handler.name)))
                for pipeline in _callees_first(spec.pipelines):
                    await self.pipeline(pipeline, _place(file, places.get(pipeline.name)), tasks)
            finally:
                with trio.CancelScope(shield=True):
                    for kept in reversed(self._kept):
                        await kept.servable.aclose()
            tasks.cancel_scope.cancel()

    async def pipeline(self, spec: PipelineSpec, place: _Place, tasks: trio.Nursery) -> None:
        """Check a pipeline's settings, and load it with the models that it calls if nothing is wrong with them."""
        # As with graphs.
        from ovmstrio.runtimes.pipelines.load_pipeline import load_pipeline  # noqa: PLC0415
        from ovmstrio.runtimes.pipelines.structure import examine_structure  # noqa: PLC0415

        # Loading tells errors of the structure again, as the same problems, and logs its warnings.
        self.add(*spec.problems, *examine_structure(spec)[1])
        if spec.errors:
            return
        try:
            servable = await load_pipeline(spec, lease=self._lease_kept, tasks=tasks)
        except ServerError as error:
            self.add(*(each if each.file else place.of(each) for each in _problems_of(error)))
        else:
            await self._note_loaded(spec, 1, servable)

    async def _note_loaded(self, spec: ServableSpec, version: int, servable: Servable) -> None:
        """Note a version, and close it unless pipelines call it."""
        self.loaded.append(LoadedVersion(spec.name, version))
        if spec.name in self._called:
            self._kept.append(_Kept(spec.name, str(version), servable, is_only=not isinstance(spec, ModelSpec)))
        else:
            await servable.aclose()

    async def _lease_kept(self, name: str, version: str = "") -> _Kept:
        """Stand for the registry: only what pipelines call is there."""
        found = {int(kept.version): kept for kept in self._kept if kept.name == name}
        number = int(version or "0") or max(found, default=0)
        for kept in found.values():
            if kept.is_only or int(kept.version) == number:
                return kept
        raise NotFound(f'"{name}" version "{version}" is not served, or could not be loaded')

    async def handler(self, spec: HandlerSpec, place: _Place) -> None:
        """Check a handler's settings, and its project if nothing is wrong with them."""
        self.add(*spec.problems)
        if spec.errors:
            return
        if await trio.Path(spec.path).exists():
            await self.project(spec.path, mounted_as=spec.name)
        else:
            self.add(place.of(Problem("the project does not exist", path="path", found=str(spec.path))))

    async def project(self, path: Path, mounted_as: str = "") -> None:
        """Check a project's file, and import its handler if nothing is wrong with it."""
        try:
            project, warnings = await trio.to_thread.run_sync(partial(read_project, path, mounted_as=mounted_as))
        except ConfigError as error:
            self.add(*error.problems)
            return
        self.add(*warnings)
        if not self.imports:
            return
        problems = await try_handler(project)
        self.add(*problems)
        if all(problem.severity != "error" for problem in problems):
            self.loaded.append(LoadedVersion(project.name, 1))

    async def graph(self, spec: GraphSpec, place: _Place, tasks: trio.Nursery) -> None:
        """Check a graph's settings and its file, and load it if nothing is wrong with them."""
        # What only graphs need is left alone where there are none.
        from ovmstrio.runtimes.graphs.examining import examine_graph  # noqa: PLC0415

        self.add(*spec.problems)
        if not await trio.Path(spec.graph_path).is_file():
            missing = Problem("the graph's file does not exist", path="graph_path", found=str(spec.graph_path))
            self.add(place.of(missing))
            return
        examined = await trio.to_thread.run_sync(examine_graph, spec.graph_path, spec.base_path)
        self.add(*examined.problems)
        if not spec.errors and all(problem.severity != "error" for problem in examined.problems):
            await self._load_graph(spec, tasks)

    async def _load_graph(self, spec: GraphSpec, tasks: trio.Nursery) -> None:
        from ovmstrio.runtimes.graphs.load_graph import load_graph  # noqa: PLC0415

        try:
            servable = await load_graph(spec, lease=_lease_nothing, tasks=tasks)
        except ServerError as error:
            graph_file = str(spec.graph_path)
            self.add(*(replace(each, file=each.file or graph_file) for each in _problems_of(error)))
        else:
            await self._note_loaded(spec, 1, servable)

    async def model(self, spec: ModelSpec, place: _Place, tasks: trio.Nursery) -> None:
        """Check a model's settings, and the versions that would be served."""
        self.add(*spec.problems)
        if not place.names_base_path or any(problem.path.endswith("base_path") for problem in spec.problems):
            return
        try:
            listing = await trio.to_thread.run_sync(scan, spec.base_path)
        except ConfigError as error:
            self.add(*(self._in_settings(problem, spec, place) for problem in error.problems))
            return
        self._note_listing(listing, spec, place)
        async with trio.open_nursery() as nursery:
            for version in spec.version_policy.select(listing.versions):
                nursery.start_soon(self._version, spec, version, listing.versions[version], place, tasks)

    def _note_listing(self, listing: Listing, spec: ModelSpec, place: _Place) -> None:
        self.add(*(Problem(text, str(spec.base_path), severity="warning") for text in listing.warnings))
        if isinstance(spec.version_policy, SpecificVersions):
            missing = sorted(set(spec.version_policy.versions) - set(listing.versions))
            found = ", ".join(map(str, listing.versions)) or "none"
            for version in missing:
                problem = Problem(f"version {version} does not exist", path="model_version_policy", severity="warning")
                self.add(place.of(replace(problem, expected=f"{spec.base_path / str(version)}", found=found)))

    async def _version(
        self, spec: ModelSpec, version: int, directory: Path, place: _Place, tasks: trio.Nursery
    ) -> None:
        """Check one version's files, and load it if nothing is wrong with them or with the model's settings."""
        problems = await trio.to_thread.run_sync(_file_problems, directory)
        self.add(*problems)
        if problems or spec.problems:
            return
        try:
            servable = await load_model(spec, version, directory, tasks=tasks)
        except ServerError as error:
            self.add(*(self._of_load(problem, spec, directory, place) for problem in _problems_of(error)))
        else:
            await self._note_loaded(spec, version, servable)

    def _in_settings(self, problem: Problem, spec: ModelSpec, place: _Place) -> Problem:
        """Point a problem of the base path at where it is written, if it is written anywhere."""
        if place.settings is None:
            return problem
        return place.of(replace(problem, path="base_path", found=problem.found or str(spec.base_path)))

    def _of_load(self, problem: Problem, spec: ModelSpec, directory: Path, place: _Place) -> Problem:
        """Point a problem of loading at the setting that causes it, or at the model's own files."""
        if problem.file == spec.origin or problem.path:
            return place.of(problem)
        return problem if problem.file else replace(problem, file=str(directory))


def _place(file: str, found: Place | None) -> _Place:
    return _Place(file) if found is None else _Place(found.file, found.settings)


def _problems_of(error: ServerError) -> tuple[Problem, ...]:
    return error.problems if isinstance(error, ConfigError) else (Problem(error.message),)


async def _lease_nothing(name: str, version: str = "") -> NoReturn:
    """Stand for the registry: nothing is served."""
    raise NotFound(f'"{name}" version "{version}" is not served while a configuration is checked')


def _versions(base_path: Path) -> dict[int, Path]:
    try:
        return scan(base_path).versions
    except ConfigError:
        return {}


def _file_problems(directory: Path) -> list[Problem]:
    """Look at a version's files without loading them."""
    problems: list[Problem] = []
    for read in (find_model_file, read_mapping):
        try:
            read(directory)
        except ConfigError as error:
            problems.extend(error.problems)
    return problems
