"""The entries of a ``model_config_list``, each of which configures a model, a graph or a model of another server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import Field

from ovmstrio.config.documents import OPTIONAL, Schema, check_members
from ovmstrio.config.findings import Findings
from ovmstrio.config.graph_entries import is_graph
from ovmstrio.config.located import Located, Place
from ovmstrio.config.model_options import check_base_path, check_name, read_model_options
from ovmstrio.config.service_entries import ServiceEntry
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import Problem

__all__ = ["KnownModel", "ModelEntries"]

_NOT_SERVED: Final = "is not served by this version"

Count = Annotated[int, Field(ge=0)]
Object = dict[str, Any]


class KnownModel(NamedTuple):
    """A model that has taken its name."""

    spec: ModelSpec
    place: Place


class _Entry(Schema):
    config: Object


class _Model(ServiceEntry):
    name: str
    base_path: str = OPTIONAL
    batch_size: Count | str = OPTIONAL
    batching: Object = OPTIONAL
    shape: str | dict[str, str] = OPTIONAL
    shape_buckets: Object = OPTIONAL
    layout: str | dict[str, str] = OPTIONAL
    mean: str | float | list[float] = OPTIONAL
    scale: str | float | list[float] = OPTIONAL
    precision: str | dict[str, str] = OPTIONAL
    color_format: str | dict[str, str] = OPTIONAL
    model_version_policy: Object = OPTIONAL
    nireq: Count = OPTIONAL
    target_device: str = OPTIONAL
    plugin_config: dict[str, str | bool | int | float] = OPTIONAL
    allow_cache: bool = OPTIONAL
    custom_loader_options: Object = OPTIONAL
    graph_path: str = OPTIONAL
    subconfig: str = OPTIONAL
    stateful: bool = OPTIONAL
    idle_sequence_cleanup: bool = OPTIONAL
    low_latency_transformation: bool = OPTIONAL
    max_sequence_number: Count = OPTIONAL
    sequence_migration: bool = OPTIONAL


@dataclass(slots=True)
class ModelEntries:
    """Reads the entries of one file.

    Attributes:
        findings: the problems of the file, those of entries that are not served among them.
        directory: where the paths in the file lead on from.
        cache_dir: where models keep what was compiled.
        known: the models so far, by name, whatever file they are in; those that are read are added.
        graphs: the settings of those entries that are graphs.
        remotes: the entries, unread, of models that other servers have.
    """

    section: ClassVar[str] = "model_config_list"

    findings: Findings
    directory: Path
    cache_dir: Path | None
    known: dict[str, KnownModel]
    graphs: list[Located] = field(default_factory=list)
    remotes: list[Located] = field(default_factory=list)

    def read(self, entries: Iterable[Located]) -> None:
        """Read entries in their order; of two with one name the first counts."""
        for entry in entries:
            members = check_members(entry, _Entry, self.findings)
            if "config" in members:
                self._read_config(members["config"])

    def _read_config(self, config: Located) -> None:
        if "remote" in config.members:
            self.remotes.append(config)
            return
        good = check_members(config, _Model, self.findings)
        given = {key: node.plain() for key, node in good.items()}
        if is_graph(given, self.directory):
            self.graphs.append(replace(config, value=good))
            return
        fields, problems = read_model_options(given)
        problems += self._own_rules(config, given)
        placed = [self.findings.place(config, problem) for problem in problems]
        errors = [problem for problem in placed if problem.severity == "error"]
        self.findings.problems += [problem for problem in placed if problem.severity != "error"]
        base_path_told = "base_path" not in given and _is_told("base_path", config, given)
        if "name" not in given or base_path_told:
            self.findings.problems += errors
            return
        spec = ModelSpec(
            name=given["name"],
            base_path=self.directory / given.get("base_path", ""),
            cache_dir=self.cache_dir,
            origin=f"{self.findings.file}:{config.line}",
            problems=tuple(errors),
            place=Place(self.findings.file, config),
            **fields,
        )
        self._add(spec, config)

    def _own_rules(self, config: Located, given: Mapping[str, Any]) -> list[Problem]:
        """Check what the command line cannot get wrong, or not in this way."""
        problems = check_name(given["name"]) if "name" in given else []
        if "base_path" in given:
            problems += check_base_path(given["base_path"])
        elif not _is_told("base_path", config, given):
            problems.append(Problem("the key 'base_path' is missing", suggestion="add it"))
        if "custom_loader_options" in given:
            problems.append(Problem(f"a custom loader {_NOT_SERVED}", path="custom_loader_options"))
        return problems

    def _add(self, spec: ModelSpec, config: Located) -> None:
        first = self.known.setdefault(spec.name, KnownModel(spec, Place(self.findings.file, config)))
        if first.spec is spec:
            return
        self.findings.problems += spec.problems
        other_file = first.place.file != self.findings.file
        # Graphs may share a model, and each may configure it.
        if other_file and not first.spec.needs_reload(spec):
            return
        line = first.place.settings.line
        problem = Problem(
            f"the name {spec.name!r} is taken, so this model is not served",
            path="name",
            expected="a name of its own",
            suggestion=f"{first.place.file}:{line} has it" if other_file else f"line {line} has it",
            severity="warning" if other_file else "error",
        )
        self.findings.problems.append(self.findings.place(config, problem))


def _is_told(key: str, config: Located, given: Mapping[str, Any]) -> bool:
    """Tell whether a key that is not there was refused as it is written."""
    return bool(get_close_matches(key, config.value.keys() - given.keys()))
