"""OVMS's ``config.json``, read into specs with every problem of the file at once.

Two kinds of problem are told apart.  What breaks the form of the file (no JSON, an unknown key, a wrong type, a wrong
metric family) makes all of it unusable.  What is wrong with the settings of one service stays with it; it then fails
to load while the rest is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import create_model

from ovmstrio.config.config_file import ConfigFile, ReadsConfig, with_article
from ovmstrio.config.documents import OPTIONAL, Schema, check_members, items_of, load_document
from ovmstrio.config.findings import Findings, by_line, did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.config.service_entries import with_limits
from ovmstrio.config.specs import MetricsSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.metric_families import FAMILIES, OWN_FAMILIES, families_like

__all__ = ["Examined", "check_families", "examine_config", "parse_config"]

_NOT_SERVED: Final = "is not served by this version"

Object = dict[str, Any]


class _File(Schema):
    model_config_list: list[Any]


class _Monitoring(Schema):
    metrics: Object


class _Metrics(Schema):
    hints: ClassVar[Mapping[str, str]] = {"endpoint_path": "metrics are served on /metrics; remove it"}

    enable: bool
    metrics_list: list[str] = OPTIONAL


@dataclass(frozen=True, slots=True)
class Examined:
    """What was understood of a file: ``fatal`` problems make it unusable, whatever ``spec`` holds."""

    spec: ServerSpec
    fatal: tuple[Problem, ...]


def parse_config(
    kinds: Iterable[ReadsConfig], content: bytes, path: Path, *, cache_dir: Path | None = None
) -> ServerSpec:
    """Read the content of a file.

    Who watches a file that others write reads it again after a pause when this fails, because it may be half written.

    Args:
        kinds: read the lists of their services; a name that several use is the first one's of them.
        content: what the file holds.
        path: where it lies, for messages and for the paths in it, which lead on from its directory.
        cache_dir: where models keep what was compiled; the file cannot say.

    Returns:
        What to serve.  Anything whose settings cannot be used is there with its problems, and must not be
        loaded; the specification's own problems are of neither, or warnings.

    Raises:
        ConfigError: the file as a whole cannot be used; lists every problem that it has.
    """
    examined = examine_config(kinds, content, path, cache_dir=cache_dir)
    if examined.fatal:
        spec = examined.spec
        own = [problem for service in spec.services for problem in service.problems]
        raise ConfigError(by_line([*examined.fatal, *spec.problems, *own]))
    return examined.spec


def examine_config(
    kinds: Iterable[ReadsConfig], content: bytes, path: Path, *, cache_dir: Path | None = None
) -> Examined:
    """Read the content of a file as far as it can be understood; see :func:`parse_config`.

    Raises:
        ConfigError: it is not JSON.
    """
    document = load_document(content, str(path))
    findings = Findings(str(path))
    findings.refuse_repeated(document)
    # Paths in the file must not come to hold the `..` that led to the file.
    directory = path.parent.resolve()
    kinds = tuple(kinds)
    members = check_members(document.root, _schema(kinds), findings)
    file = ConfigFile(findings, directory, members, cache_dir)
    services = _read_services(kinds, file)
    metrics = _read_monitoring(members["monitoring"], findings) if "monitoring" in members else None
    for item in items_of(members, "custom_loader_config_list"):
        findings.warn(item, f"{_loader_name(item)} {_NOT_SERVED}", "it is left out")
    spec = ServerSpec(
        services=services,
        metrics=metrics,
        problems=(*by_line(findings.problems), *file.subconfigs.problems),
        further_files=file.subconfigs.contents,
    )
    return Examined(spec, by_line(findings.fatal))


def check_families(names: Sequence[str], *, patterns: bool = False) -> list[tuple[int, str, str]]:
    """Check a list of metric families; gives the position, the message and the suggestion of each wrong one.

    With ``patterns`` they are patterns of the names of any families, and else names of OVMS's.
    """
    wrong = []
    known = (*FAMILIES, *OWN_FAMILIES) if patterns else tuple(FAMILIES)
    for index, name in enumerate(names):
        if not (families_like([name]) if patterns else name in known):
            suggestion = did_you_mean(name, known, otherwise=f"known are {', '.join(known)}")
            wrong.append((index, f"unknown metric family {name!r}", suggestion))
        elif name in names[:index]:
            wrong.append((index, f"the metric family {name!r} is given twice", "remove one of them"))
    return wrong


def _schema(kinds: Iterable[ReadsConfig]) -> type[Schema]:
    sections = [name for kind in kinds for name in (kind.section, *kind.further_sections) if name]
    lists: dict[str, Any] = dict.fromkeys([*sections, "custom_loader_config_list"], (list[Object], OPTIONAL))
    lists.pop("model_config_list", None)
    return create_model("_WholeFile", __base__=_File, **lists, monitoring=(Object, OPTIONAL))


def _read_services(kinds: Sequence[ReadsConfig], file: ConfigFile) -> tuple[ServableSpec, ...]:
    """Read every list, and leave out whatever has the name of something that is served already."""
    # The models that graphs bring with them are known once the graphs have been read.
    read = {kind: kind.read(file) for kind in reversed(kinds)}
    taken: dict[str, ServableSpec] = {}
    for kind in kinds:
        for each in read[kind]:
            spec = with_limits(each, file.findings)
            first = taken.setdefault(spec.name, spec)
            if first is not spec:
                _refuse_occupied(kind.occupied, spec, first, file.findings)
    return tuple(taken.values())


def _refuse_occupied(message: str, spec: ServableSpec, other: ServableSpec, findings: Findings) -> None:
    problem = Problem(
        f"{message}: {spec.name!r} is {with_article(other.kind)}'s, which is served",
        path="name",
        expected="a name of its own",
        suggestion=f"{other.origin} has it",
    )
    findings.problems.append(spec.placed(problem))


def _read_monitoring(node: Located, findings: Findings) -> MetricsSpec | None:
    members = check_members(node, _Monitoring, findings)
    if "metrics" not in members:
        return None
    metrics = check_members(members["metrics"], _Metrics, findings)
    if "metrics_list" not in metrics:
        return MetricsSpec(enable=metrics["enable"].value) if "enable" in metrics else None
    names = metrics["metrics_list"].plain()
    for index, message, suggestion in check_families(names):
        findings.refuse(metrics["metrics_list"].find(index), message, suggestion=suggestion)
    return MetricsSpec(enable=metrics["enable"].value, families=tuple(names)) if "enable" in metrics else None


def _loader_name(item: Located) -> str:
    name = item.find("config", "loader_name").value
    return f"custom loader {name!r}" if isinstance(name, str) else "custom loader"
