"""Configuration check: loads everything as a server does, and unloads it without a call.

::

    config.json ─> ServerSpec ─> Registry.apply ─> all problems with file and line
                        └─> Kind.examine ─────────────^
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from ovmstrio.auth.key_file import read_key_file
from ovmstrio.config.config_file import parse_config_leniently
from ovmstrio.config.specs import AllVersions, ModelSpec, PipelineSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem, ServerError, StorageFailure
from ovmstrio.core.service import Detection
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.trial import trial_load
from ovmstrio.inference.crash_probe import open_crash_probe, verdicts_folder
from ovmstrio.server.command_line import UsageError, single_servable_spec
from ovmstrio.server.kinds import KINDS, Kinds
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.target import Target, TargetKind, find_target, read_config
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.loading import find_cycles
from ovmstrio.serving.mirrors import update_mirror
from ovmstrio.serving.registry import Registry
from ovmstrio.stores.mirror import Mirror


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version that could be loaded, and the settings that loading detected."""

    model: str
    version: int
    detected: tuple[Detection, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check: loadable versions by name, and problems by file and line."""

    loaded: tuple[LoadedVersion, ...]
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that keep a service from being served."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Other problems."""
        return tuple(problem for problem in self.problems if problem.severity != "error")


async def check_config(
    path: Path | str, *, imports: bool = True, kinds: Kinds = KINDS, keys_file: Path | None = None
) -> CheckReport:
    """Check what a path serves; a model is checked with all its versions.

    Problems of the files are reported, not raised; everything is unloaded again.

    Args:
        path: what ``ovms serve PATH`` takes.
        imports: whether user code is imported, in subprocesses.
        kinds: the service kinds.
        keys_file: callers file to check too.
    """
    check = _Check(kinds, imports)
    if keys_file is not None:
        check.add(*await trio.to_thread.run_sync(check_keys, keys_file))
    try:
        target = await trio.to_thread.run_sync(find_target, path)
    except ConfigError as error:
        check.add(*error.problems)
        return check.report()
    if target.kind is TargetKind.HANDLER:
        await check.project(target.path)
    else:
        await check.all(await check.target(target, Path(path)))
    return check.report()


def check_keys(path: Path) -> list[Problem]:
    """Return the problems of a key file; blocking."""
    try:
        read_key_file(path)
    except ConfigError as error:
        return list(error.problems)
    return []


async def check_pipelines(path: Path, names: Collection[str] = (), *, load: bool = True) -> CheckReport:
    """Check pipelines of a configuration file, all or the named ones, and the services that they call.

    Problems of the files are reported, not raised; everything is unloaded again.  Without ``load`` only the file is
    checked.
    """
    check = _Check(KINDS, imports=False)
    spec = await check.file(path)
    if load:
        await check.all(spec.model_copy(update={"services": _with_dependencies(spec, names)}))
    else:
        check.add(*examine_pipelines(spec, names))
    return check.report()


def examine_pipelines(spec: ServerSpec, names: Collection[str] = ()) -> list[Problem]:
    """Return the problems of pipelines that can be found without loading."""
    from ovmstrio.pipelines.structure import examine_pipeline  # noqa: PLC0415 - as in the kinds

    configured = [service.name for service in spec.services]
    pipelines = spec.of(PipelineSpec)
    cycles = find_cycles(pipelines, _calls(pipelines))
    problems: list[Problem] = []
    for pipeline in pipelines:
        if not names or pipeline.name in names:
            problems += examine_pipeline(pipeline, configured)
            problems += [cycles[pipeline.name]] if pipeline.name in cycles else []
    return problems


def _calls(services: Collection[ServableSpec]) -> dict[str, list[str]]:
    return {spec.name: [call.name for call in KINDS[spec.kind].depends_on(spec)] for spec in services}


def _with_dependencies(spec: ServerSpec, names: Collection[str]) -> tuple[ServableSpec, ...]:
    calls = _calls(spec.services)
    wanted = {pipeline.name for pipeline in spec.of(PipelineSpec) if not names or pipeline.name in names}
    while more := {called for name in wanted for called in calls.get(name, ())} - wanted:
        wanted |= more
    return tuple(each for each in spec.services if each.name in wanted)


@dataclass(slots=True)
class _Check:
    kinds: Kinds
    imports: bool
    loaded: list[LoadedVersion] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)

    def add(self, *problems: Problem) -> None:
        self._problems.extend(problems)

    def report(self) -> CheckReport:
        loaded = sorted(self.loaded, key=lambda version: (version.model, version.version))
        # Loading repeats earlier problems, and models in one directory share theirs.
        problems = sorted(dict.fromkeys(self._problems), key=lambda problem: (problem.file, problem.line or 0))
        return CheckReport(tuple(loaded), tuple(problems))

    async def target(self, target: Target, given: Path) -> ServerSpec:
        """Return the specification of what a path serves; of a model with all its versions."""
        if target.kind is TargetKind.MODEL and "model_version_policy" not in target.options:
            spec = ModelSpec(name=target.name, base_path=target.path, version_policy=AllVersions())
            return ServerSpec(services=(spec,))
        if target.kind is TargetKind.ADDRESS:
            return await self._downloaded(ServerSettings(**target.options))
        if target.options and "config_path" not in target.options:
            settings = ServerSettings(**target.options)
            return await trio.to_thread.run_sync(single_servable_spec, settings)
        self.add(*(replace(problem, severity="warning") for problem in target.skipped))
        # Problems name the file as the caller does.
        here = None if given.is_absolute() else Path.cwd()
        is_below = here is not None and target.path.is_relative_to(here)
        return await self.file(target.path.relative_to(here) if here and is_below else target.path)

    async def _downloaded(self, settings: ServerSettings) -> ServerSpec:
        try:
            return (await read_plan(settings, self.kinds)).spec
        except ServerError as error:
            problems = error.problems if isinstance(error, ConfigError) else (Problem(error.message),)
            self.add(*problems)
        except UsageError as error:
            self.add(*error.problems)
        return ServerSpec()

    async def file(self, path: Path) -> ServerSpec:
        """Return the specification of a configuration file, as far as it can be parsed."""
        try:
            content = await trio.to_thread.run_sync(read_config, path, abandon_on_cancel=True)
            examined = parse_config_leniently(self.kinds.values(), content, path)
            if await self._download(examined.spec):
                # The kind of a service depends on its files.
                examined = parse_config_leniently(self.kinds.values(), content, path)
        except OSError as error:
            self.add(Problem(f"configuration not readable: {error.strerror or error}", str(path)))
        except ConfigError as error:
            self.add(*error.problems)
        else:
            self.add(*examined.fatal)
            return examined.spec
        return ServerSpec()

    async def _download(self, spec: ServerSpec) -> bool:
        """Download the files of remote services; return whether any were new."""
        changed = False
        for service in spec.services:
            for address in service.sources:
                try:
                    changed |= await update_mirror(Mirror(address), (service.version_policy,))
                except StorageFailure as error:
                    self.add(service.placed(Problem(error.message, path="base_path")))
        return changed

    async def all(self, spec: ServerSpec) -> None:
        self.add(*spec.problems, *(problem for service in spec.services for problem in service.problems))
        self.add(*await trio.to_thread.run_sync(self._examine, spec.services))
        registry = Registry(self.kinds, partial(LoadContext, is_trial=True), poll_seconds=0)
        async with trio.open_nursery() as nursery:
            with open_crash_probe(nursery, "auto", verdicts_folder()) as probe:
                await nursery.start(registry.run)
            registry.context.share(probe)
            tried = [service for service in spec.services if self.imports or not self.kinds[service.kind].imports]
            await registry.apply(tried)
            for service in tried:
                versions = registry.available_versions(service.name)
                self.loaded += [
                    LoadedVersion(service.name, version, registry.detections(service.name, str(version)))
                    for version in versions
                ]
            self.add(*registry.findings())
            nursery.cancel_scope.cancel()

    def _examine(self, services: Sequence[ServableSpec]) -> list[Problem]:
        return [spec.placed(problem) for spec in services for problem in self._problems_of(spec)]

    def _problems_of(self, spec: ServableSpec) -> Sequence[Problem]:
        try:
            return self.kinds[spec.kind].examine(spec)
        except ConfigError as error:
            return error.problems
        except (OSError, ValueError) as error:
            return [Problem(f"the files cannot be examined: {error}")]

    async def project(self, path: Path) -> None:
        """Check a handler project, and import its handler if there is no error."""
        try:
            project, warnings = await trio.to_thread.run_sync(read_project, path)
        except ConfigError as error:
            self.add(*error.problems)
            return
        self.add(*warnings)
        if not self.imports:
            return
        problems = await trial_load(project)
        self.add(*problems)
        if all(problem.severity != "error" for problem in problems):
            self.loaded.append(LoadedVersion(project.name, 1))
