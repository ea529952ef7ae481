"""Which versions of a model are served: ``{"latest": {"num_versions": 2}}``, ``{"all": {}}``, ``{"specific": ...}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ovmstrio.config.by_tensor import object_in_text
from ovmstrio.config.findings import did_you_mean, wrong
from ovmstrio.config.specs import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from ovmstrio.core.errors import ConfigError

__all__ = ["format_version_policy", "parse_version_policy"]

_OPTION: Final = "model_version_policy"
_FORM: Final = '{"latest": {"num_versions": 2}}, {"all": {}} or {"specific": {"versions": [1, 3]}}'
_MAX_VERSION: Final = 2**63 - 1


def parse_version_policy(value: Any) -> VersionPolicy:
    """Read the option ``model_version_policy``: an object, or a text that holds one (command line).

    Raises:
        ConfigError: it has another form.
    """
    if isinstance(value, str):
        value = object_in_text(_OPTION, value)
    if not isinstance(value, Mapping):
        raise wrong(_OPTION, value, _FORM)
    if len(value) != 1:
        raise wrong(_OPTION, value, _FORM, message="exactly one policy must be named")
    kind, details = next(iter(value.items()))
    read = _KINDS.get(kind)
    if read is None:
        suggestion = did_you_mean(str(kind), _KINDS)
        raise wrong(_OPTION, value, _FORM, message=f"unknown policy {kind!r}", suggestion=suggestion)
    if not isinstance(details, Mapping):
        raise wrong(f"{_OPTION}.{kind}", details, "an object")
    return read(details)


def format_version_policy(policy: VersionPolicy) -> dict[str, Any]:
    """Write a policy as :func:`parse_version_policy` reads it."""
    if isinstance(policy, LatestVersions):
        return {"latest": {"num_versions": policy.num_versions}}
    return {"all": {}} if isinstance(policy, AllVersions) else {"specific": {"versions": list(policy.versions)}}


def _latest(details: Mapping[str, Any]) -> VersionPolicy:
    _refuse_others("latest", details, "num_versions")
    number = details.get("num_versions", 1)
    if not _is_positive(number):
        raise wrong(f"{_OPTION}.latest.num_versions", number, "an integer of 1 or more")
    return LatestVersions(num_versions=number)


def _all(details: Mapping[str, Any]) -> VersionPolicy:
    if details:
        raise wrong(f"{_OPTION}.all", details, "an empty object")
    return AllVersions()


def _specific(details: Mapping[str, Any]) -> VersionPolicy:
    _refuse_others("specific", details, "versions")
    versions = details.get("versions")
    if not isinstance(versions, list) or not versions or not all(map(_is_positive, versions)):
        raise wrong(f"{_OPTION}.specific.versions", versions, "a list of integers of 1 or more, such as [1, 3]")
    return SpecificVersions(versions=tuple(versions))


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], VersionPolicy]]] = {
    "latest": _latest,
    "all": _all,
    "specific": _specific,
}


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_VERSION


def _refuse_others(kind: str, details: Mapping[str, Any], known: str) -> None:
    others = [str(key) for key in details if key != known]
    if others:
        raise _unknown_key(kind, others[0], known)


def _unknown_key(kind: str, key: str, known: str) -> ConfigError:
    option = f"{_OPTION}.{kind}.{key}"
    return wrong(option, key, repr(known), message=f"unknown key {key!r}", suggestion=did_you_mean(key, [known]))
