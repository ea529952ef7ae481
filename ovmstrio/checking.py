"""Whether a configuration would serve: everything is read and loaded, nothing is served, every problem is told.

::

    config.json ─┬> models ─> versions on disk ─> model file, mapping ─> load, unload
                 └> graphs ─> graph file, contracts, wiring ───────────> load, unload
                         └──────────────── problems of each step, by file and line
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NoReturn

import trio

from ovmstrio.config.command_line import single_servable
from ovmstrio.config.graph_entries import is_graph
from ovmstrio.config.json_locations import Located
from ovmstrio.config.mapping import read_mapping
from ovmstrio.config.model_entries import Place
from ovmstrio.config.ovms_json import examine_config
from ovmstrio.config.settings import ServeSettings
from ovmstrio.config.specs import AllVersions, GraphSpec, ModelSpec, ServerSpec, SpecificVersions
from ovmstrio.errors import ConfigError, NotFound, Problem, ServerError
from ovmstrio.models import load_model
from ovmstrio.repository.versions import Listing, find_model_file, scan

__all__ = ["CheckReport", "LoadedVersion", "check_config"]

_CONFIG_NAME: Final = "config.json"


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version of a model or graph that was loaded, and unloaded again."""

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


async def check_config(path: Path) -> CheckReport:
    """Check a configuration file, a model's directory with all its versions, or a graph's.

    Owns what it loads: each is unloaded before this returns.  Raises nothing for what is wrong with the
    files; that is the report.

    Cancellation: at any checkpoint; a load that has begun is dropped.
    """
    check = _Check()
    if await trio.Path(path).is_dir():
        await check.directory(path)
    else:
        await check.file(path)
    return check.report()


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


@dataclass(slots=True)
class _Check:
    loaded: list[LoadedVersion] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)

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
            await self.model(spec, _Place(str(path)))
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
        await self._all(spec, str(path), {})

    async def file(self, path: Path) -> None:
        """Check a configuration file and all that it names."""
        try:
            content = await trio.Path(path).read_bytes()
            examined = examine_config(content, path)
        except OSError as error:
            self.add(Problem(f"the configuration cannot be read: {error.strerror or error}", str(path)))
        except ConfigError as error:
            self.add(*error.problems)
        else:
            self.add(*examined.fatal, *examined.spec.problems)
            await self._all(examined.spec, str(path), examined.places)

    async def _all(self, spec: ServerSpec, file: str, places: Mapping[str, Place]) -> None:
        async with trio.open_nursery() as nursery:
            for model in spec.models:
                nursery.start_soon(self.model, model, _place(file, places.get(model.name)))
            for graph in spec.graphs:
                nursery.start_soon(self.graph, graph, _place(file, places.get(graph.name)))

    async def graph(self, spec: GraphSpec, place: _Place) -> None:
        """Check a graph's settings and its file, and load it if nothing is wrong with them."""
        # What only graphs need is left alone where there are none.
        from ovmstrio.graphs.examining import examine_graph  # noqa: PLC0415

        self.add(*spec.problems)
        if not await trio.Path(spec.graph_path).is_file():
            missing = Problem("the graph's file does not exist", path="graph_path", found=str(spec.graph_path))
            self.add(place.of(missing))
            return
        examined = await trio.to_thread.run_sync(examine_graph, spec.graph_path, spec.base_path)
        self.add(*examined.problems)
        if not spec.errors and all(problem.severity != "error" for problem in examined.problems):
            await self._load_graph(spec)

    async def _load_graph(self, spec: GraphSpec) -> None:
        from ovmstrio.graphs.loading import load_graph  # noqa: PLC0415

        async with trio.open_nursery() as tasks:
            try:
                servable = await load_graph(spec, lease=_lease_nothing, tasks=tasks)
            except ServerError as error:
                graph_file = str(spec.graph_path)
                self.add(*(replace(each, file=each.file or graph_file) for each in _problems_of(error)))
            else:
                await servable.aclose()
                self.loaded.append(LoadedVersion(spec.name, 1))
            tasks.cancel_scope.cancel()

    async def model(self, spec: ModelSpec, place: _Place) -> None:
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
                nursery.start_soon(self._version, spec, version, listing.versions[version], place)

    def _note_listing(self, listing: Listing, spec: ModelSpec, place: _Place) -> None:
        self.add(*(Problem(text, str(spec.base_path), severity="warning") for text in listing.warnings))
        if isinstance(spec.version_policy, SpecificVersions):
            missing = sorted(set(spec.version_policy.versions) - set(listing.versions))
            found = ", ".join(map(str, listing.versions)) or "none"
            for version in missing:
                problem = Problem(f"version {version} does not exist", path="model_version_policy", severity="warning")
                self.add(place.of(replace(problem, expected=f"{spec.base_path / str(version)}", found=found)))

    async def _version(self, spec: ModelSpec, version: int, directory: Path, place: _Place) -> None:
        """Check one version's files, and load it if nothing is wrong with them or with the model's settings."""
        problems = await trio.to_thread.run_sync(_file_problems, directory)
        self.add(*problems)
        if problems or spec.problems:
            return
        async with trio.open_nursery() as tasks:
            try:
                servable = await load_model(spec, version, directory, tasks=tasks)
            except ServerError as error:
                self.add(*(self._of_load(problem, spec, directory, place) for problem in _problems_of(error)))
            else:
                await servable.aclose()
                self.loaded.append(LoadedVersion(spec.name, version))

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
