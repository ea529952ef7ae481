"""What the registry knows of one name, whatever its kind: its versions, their states, and which of them answers.

The only place where a state changes.  ``serving`` is kept so that a look-up costs two dictionary accesses: it maps the
version as requests spell it to the instance that answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import Problem, ServiceLoading, VersionLoading, VersionMissing, VersionRetired
from ovmstrio.serving.model_versions import ONLY_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.errors import ServerError
    from ovmstrio.serving.instances import Instance
    from ovmstrio.serving.kind import Dependency, Kind
    from ovmstrio.util.backoff import Backoff

__all__ = [
    "DEFAULT_VERSION",
    "OK",
    "ApplyResult",
    "Failure",
    "Readiness",
    "ServiceRecord",
    "VersionRecord",
    "VersionState",
    "VersionStatus",
    "error_code_of",
]

# ----------------------------------------------------------------------
# What the registry tells of what it serves: states, readiness and the outcome of a change
# ----------------------------------------------------------------------

OK: Final = "OK"


class VersionState(IntEnum):
    """Where a version is in its life; the numbers are TensorFlow Serving's."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version at one moment.

    ``error_code`` is ``"OK"``, ``"UNKNOWN"`` (a model's load failed) or ``"FAILED_PRECONDITION"`` (a pipeline's
    or a graph's); ``reason`` says in words why it failed.  A version that is AVAILABLE with an error code serves what
    was loaded before the failure.  ``load_seconds`` is the time that the last load took, None before the first has
    ended, and ``grown_bytes`` by how much it made the process grow, None where that cannot be told.  ``kind`` is
    ``"model"``, ``"pipeline"`` or ``"graph"``.
    """

    name: str
    version: int
    state: VersionState
    error_code: str = OK
    reason: str = ""
    load_seconds: float | None = None
    kind: str = "model"
    grown_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests will be served, and if not, why."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """What one change of the registry came to.

    ``changed`` tells whether anything was loaded or retired.  A failure of a whole model, such as a path that does
    not exist, has version 0.
    """

    changed: bool = False
    failures: tuple[VersionStatus, ...] = ()


# ----------------------------------------------------------------------
# What the registry knows of one name, whatever its kind: its versions, their states, and which of them answers
# ----------------------------------------------------------------------

DEFAULT_VERSION: Final = 0
"""The number by which requests ask for the highest version available."""


def error_code_of(kind: Kind[Any]) -> str:
    """Give the code of what could not be loaded: OVMS has one for models, and another one for all else."""
    return "UNKNOWN" if kind.has_versions else "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Failure:
    """A load that failed: with which settings, over which files, when to try again, and what pauses come then.

    ``problems`` say why, with the places where that can be mended.
    """

    spec: ServableSpec
    files: str
    backoff: Backoff
    retry_at: float
    problems: tuple[Problem, ...] = ()


@dataclass(slots=True, eq=False)
class VersionRecord:
    """One version: its state, the instance that serves it, if any, and how many retired ones are still open.

    ``loads`` counts those that succeeded; ``kind`` is that of what was loaded, or is being loaded.
    """

    name: str
    version: int
    kind: Kind[Any]
    state: VersionState = VersionState.START
    error_code: str = OK
    reason: str = ""
    load_seconds: float | None = None
    grown_bytes: int | None = None
    instance: Instance | None = None
    failure: Failure | None = None
    closing: int = 0
    loads: int = 0

    @property
    def status(self) -> VersionStatus:
        """The record as others see it."""
        return VersionStatus(
            self.name,
            self.version,
            self.state,
            self.error_code,
            self.reason,
            self.load_seconds,
            self.kind.name,
            self.grown_bytes,
        )

    @property
    def is_pending(self) -> bool:
        """Whether a load is under way that may make the version available."""
        return self.state <= VersionState.LOADING and self.error_code == OK


class ServiceRecord:
    """One name with all versions ever seen; ``spec`` is None once the name is not configured any more.

    ``kind`` is that of what it stands for, or stood for when it was last configured.  What has no versions has the one
    version 1, which answers whatever version is asked for.  ``settled`` turns true when the first pass over the
    versions has ended; ``problem`` says why they could not even be listed, and ``problems`` say it with their places.
    ``calls`` are what it depends on, ``circle`` says how it would call itself, and ``unmet`` what it calls in vain.
    """

    def __init__(self, name: str, kind: Kind[Any], publish: Callable[[VersionStatus], None]) -> None:
        self.name = name
        self.spec: ServableSpec | None = None
        self.kind = kind
        self.versions: dict[int, VersionRecord] = {}
        self.serving: dict[str, Instance] = {}
        self.settled = False
        self.problem = ""
        self.problems: tuple[Problem, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.calls: tuple[Dependency, ...] = ()
        self.circle: Problem | None = None
        self.unmet: tuple[Problem, ...] = ()
        self.changed = trio.Event()
        self._publish = publish

    def configure(self, spec: ServableSpec, kind: Kind[Any]) -> None:
        """Note what the name is to stand for from now on; an only version that has to be loaded can be waited for."""
        self.settled = self.settled and self.spec is not None
        self.spec, self.kind = spec, kind
        if not self.kind.has_versions:
            record = self.versions.get(ONLY_VERSION)
            if record is None or record.state >= VersionState.UNLOADING:
                self.load_begins(ONLY_VERSION)

    def leave_out(self) -> None:
        """Note that the name is not to stand for anything any more."""
        self.spec, self.settled = None, False

    # What is asked

    @property
    def wanted(self) -> ServableSpec | None:
        """What is to be loaded: the settings, with the circle that they are part of among their problems."""
        if self.spec is None or self.circle is None:
            return self.spec
        return self.spec.model_copy(update={"problems": (*self.spec.problems, self.circle)})

    @property
    def findings(self) -> tuple[Problem, ...]:
        """Everything that is wrong with what is configured, as far as listing, ordering and loading it showed."""
        base_path = "" if self.spec is None else str(self.spec.base_path)
        warnings = (Problem(text, base_path, severity="warning") for text in self.warnings)
        failures = [record.failure.problems for record in self.versions.values() if record.failure is not None]
        remarks = [record.instance.remarks for record in self.versions.values() if record.instance is not None]
        return (*self.problems, *warnings, *self.unmet, *chain.from_iterable((*failures, *remarks)))

    def find(self, version: int) -> Instance | None:
        """Find the instance that answers for a version."""
        return self.serving.get(str(self._meant(version)))

    def record(self, version: int) -> VersionRecord | None:
        """Find what is known of a version."""
        return self.versions.get(self._meant(version))

    def loaded(self, version: int) -> str:
        """Tell which load of which version answers for a version, in words that no other load has; empty for none."""
        instance = self.find(version)
        return "" if instance is None else f"{instance.version}.{self.versions[int(instance.version)].loads}"

    def is_pending(self, version: int) -> bool:
        """Tell whether waiting may make the version, or a default one, available."""
        record = self.record(version)
        if record is not None:
            return record.is_pending
        pending = not self.settled and self.spec is not None
        return pending or (version == DEFAULT_VERSION and any(known.is_pending for known in self.versions.values()))

    def refusal(self, version: int) -> ServerError:
        """Say why a version that is not available cannot be called."""
        record = self.record(version)
        if record is None:
            return self._missing(version)
        kind, what = self.kind.name, self._named(version)
        if record.state >= VersionState.UNLOADING:
            return VersionRetired(f"{what} is retired", kind=kind)
        why = "" if self.kind.has_versions else record.reason
        has_failed = not self.is_pending(version)
        text = f"{what} is not loaded yet"
        if has_failed:
            text += f": its last load failed{f': {why}' if why else ''}"
        refusal = VersionLoading if self.kind.has_versions else ServiceLoading
        return refusal(text, kind=kind, has_failed=has_failed, why=why)

    def missing(self, version: int) -> VersionMissing:
        """Say that a version is not there, and of the default one why nothing can stand for it."""
        failed = [each for _, each in sorted(self.versions.items()) if each.failure is not None]
        text = f"{self._named(version)} is not there"
        if version != DEFAULT_VERSION or not failed:
            return VersionMissing(text)
        last = failed[-1]
        text += f": the last load of version {last.version} failed: {last.reason}"
        return VersionMissing(text, tried=last.version, why=last.reason)

    def _missing(self, version: int) -> ServerError:
        """Say that there is no record of a version, which may be because the first look has not ended."""
        if not self.is_pending(version):
            return self.missing(version)
        refusal = VersionLoading if self.kind.has_versions else ServiceLoading
        return refusal(f"{self._named(version)} is not loaded yet", kind=self.kind.name)

    def _named(self, version: int) -> str:
        """Name a version for messages."""
        if not self.kind.has_versions:
            return f'{self.kind.name} "{self.name}"'
        which = f"version {version}" if version != DEFAULT_VERSION else "the default version"
        return f'{which} of {self.kind.name} "{self.name}"'

    def _meant(self, version: int) -> int:
        return version if self.kind.has_versions else ONLY_VERSION

    def available_versions(self) -> list[int]:
        """List the versions that can be called, ascending."""
        return sorted(version for version, record in self.versions.items() if record.instance is not None)

    def statuses(self) -> list[VersionStatus]:
        """List every version ever seen, ascending."""
        return [self.versions[version].status for version in sorted(self.versions)]

    # What happens

    def load_begins(self, version: int) -> VersionRecord:
        """Note that a load has begun; a version that serves stays available."""
        record = self.versions.setdefault(version, VersionRecord(self.name, version, self.kind))
        record.kind = self.kind
        if record.instance is None:
            record.state, record.error_code, record.reason = VersionState.LOADING, OK, ""
            self._announce(record)
        return record

    def load_succeeds(self, record: VersionRecord, instance: Instance, seconds: float) -> Instance | None:
        """Let the new instance answer from now on; what it replaces is returned, to be retired."""
        replaced, record.instance = record.instance, instance
        record.state, record.error_code, record.reason = VersionState.AVAILABLE, OK, ""
        record.failure, record.load_seconds = None, seconds
        record.loads += 1
        self._route()
        self._announce(record)
        return replaced

    def load_fails(self, record: VersionRecord, reason: str, failure: Failure, seconds: float) -> None:
        """Note why a load failed; what was served goes on."""
        record.error_code, record.reason, record.failure = error_code_of(self.kind), reason, failure
        record.load_seconds = seconds
        self._announce(record)

    def forget_failure(self, record: VersionRecord) -> None:
        """Note that the settings went back to those of the instance that serves."""
        record.error_code, record.reason, record.failure = OK, "", None
        self._announce(record)

    def retirement_begins(self, record: VersionRecord) -> Instance | None:
        """Stop giving leases for a version; its instance is returned, to be closed when it is idle."""
        retired, record.instance = record.instance, None
        record.closing += retired is not None
        record.state = VersionState.UNLOADING if record.closing else VersionState.END
        record.error_code, record.reason, record.failure = OK, "", None
        self._route()
        self._announce(record)
        return retired

    def retirement_ends(self, record: VersionRecord) -> None:
        """Note that a retired instance is closed; the version may have come back meanwhile."""
        record.closing -= 1
        if record.state is VersionState.UNLOADING and not record.closing:
            record.state = VersionState.END
            self._announce(record)

    def touch(self) -> None:
        """Wake everyone who waits for a change of this model."""
        self.changed.set()
        self.changed = trio.Event()

    def _announce(self, record: VersionRecord) -> None:
        self.touch()
        self._publish(record.status)

    def _route(self) -> None:
        serving = {
            str(version): record.instance for version, record in self.versions.items() if record.instance is not None
        }
        if serving:
            default = serving[str(max(map(int, serving)))]
            serving |= {"": default, str(DEFAULT_VERSION): default}
        self.serving = serving
