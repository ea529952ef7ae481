"""Service records: the versions of one name, their states and the routing; all state changes happen here.

``serving`` maps the version as requests spell it to its instance, so that a look-up costs two dictionary accesses.
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

OK: Final = "OK"


class VersionState(IntEnum):
    """State of a version; the numbers are TensorFlow Serving's."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """Snapshot of one version.

    ``error_code`` is ``"OK"``, ``"UNKNOWN"`` (a model failed to load) or ``"FAILED_PRECONDITION"`` (any other kind
    did); ``reason`` is the failure's text.  An AVAILABLE version with an error code serves what was loaded before the
    failure. ``load_seconds`` is the duration of the last load, None before the first one ends; ``grown_bytes`` is the
    growth of the process by it, None if unknown.  ``kind`` is ``"model"``, ``"pipeline"``, ``"graph"`` ...
    """

    name: str
    version: int
    state: VersionState
    error_code: str = OK
    reason: str = ""
    load_seconds: float | None = None
    kind: str = "model"
    grown_bytes: int | None = None

    @property
    def has_failed(self) -> bool:
        """True if the last load failed and nothing is served; OVMS calls this state LOADING with an error code."""
        return self.state <= VersionState.LOADING and self.error_code != OK


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of the server, with the reason if it is not ready."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Result of a change of the registry.

    ``changed`` is true if anything was loaded or retired.  The failure of a whole service has version 0.
    """

    changed: bool = False
    failures: tuple[VersionStatus, ...] = ()


DEFAULT_VERSION: Final = 0
"""Version number by which requests select the highest available version."""


def error_code_of(kind: Kind[Any]) -> str:
    """Return OVMS's error code for a failed load: models have another one than all other kinds."""
    return "UNKNOWN" if kind.has_versions else "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed load: its settings, the fingerprint of its files, the next retry (trio time) and the problems.

    ``is_new`` is False for a retry that failed for the same reason with the same files.
    """

    spec: ServableSpec
    files: str
    backoff: Backoff
    retry_at: float
    problems: tuple[Problem, ...] = ()
    is_new: bool = True


@dataclass(slots=True, eq=False)
class VersionRecord:
    """One version: its state, its serving instance and the number of retired instances that are still open.

    ``loads`` counts successful loads; ``kind`` is that of the current or loading instance.
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
        """Snapshot for observers."""
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
        """True if a load in progress may make the version available."""
        return self.state <= VersionState.LOADING and self.error_code == OK


class ServiceRecord:
    """One name with all versions ever seen; ``spec`` is None once the name is no longer configured.

    Attributes:
        kind: current or last kind; a kind without versions has the one version 1, which answers for every version.
        settled: whether the first pass over the versions has ended.
        is_expected: whether it was configured when the server started, or has been available since it was configured;
            only then its failure makes the server unready.
        problem: why the versions could not be listed; ``problems`` has the same with their places.
        calls: dependencies.
        circle: a circular dependency that includes this service.
        unmet: missing dependencies.
    """

    def __init__(self, name: str, kind: Kind[Any], publish: Callable[[VersionStatus], None]) -> None:
        self.name = name
        self.spec: ServableSpec | None = None
        self.kind = kind
        self.versions: dict[int, VersionRecord] = {}
        self.serving: dict[str, Instance] = {}
        self.settled = False
        self.is_expected = False
        self.problem = ""
        self.problems: tuple[Problem, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.calls: tuple[Dependency, ...] = ()
        self.circle: Problem | None = None
        self.unmet: tuple[Problem, ...] = ()
        self.changed = trio.Event()
        self._publish = publish

    def configure(self, spec: ServableSpec, kind: Kind[Any]) -> None:
        """Set the configuration of the name; a service without versions becomes pending at once."""
        self.settled = self.settled and self.spec is not None
        self.spec, self.kind = spec, kind
        if not self.kind.has_versions:
            record = self.versions.get(ONLY_VERSION)
            if record is None or record.state >= VersionState.UNLOADING:
                self.begin_load(ONLY_VERSION)

    def unconfigure(self) -> None:
        """Mark the name as no longer configured."""
        self.spec, self.settled, self.is_expected = None, False, False

    # Queries
    @property
    def is_required(self) -> bool:
        """True if the server's readiness may depend on the service."""
        return self.spec is not None and self.spec.required

    @property
    def wanted(self) -> ServableSpec | None:
        """The spec to load, with a circular dependency among its problems."""
        if self.spec is None or self.circle is None:
            return self.spec
        return self.spec.model_copy(update={"problems": (*self.spec.problems, self.circle)})

    @property
    def findings(self) -> tuple[Problem, ...]:
        """All problems found while listing, ordering and loading."""
        base_path = "" if self.spec is None else str(self.spec.base_path)
        warnings = (Problem(text, base_path, severity="warning") for text in self.warnings)
        failures = [record.failure.problems for record in self.versions.values() if record.failure is not None]
        reported = [record.instance.warnings for record in self.versions.values() if record.instance is not None]
        return (*self.problems, *warnings, *self.unmet, *chain.from_iterable((*failures, *reported)))

    @property
    def listing_failure(self) -> VersionStatus:
        """State of a service whose versions could not be listed."""
        code = error_code_of(self.kind)
        return VersionStatus(self.name, 0, VersionState.LOADING, code, self.problem, kind=self.kind.name)

    def find(self, version: int) -> Instance | None:
        """Return the instance that serves a version, or None."""
        return self.serving.get(str(self._effective_version(version)))

    def record(self, version: int) -> VersionRecord | None:
        """Return the record of a version, or None."""
        return self.versions.get(self._effective_version(version))

    def loaded(self, version: int) -> str:
        """Return an id of the load that serves a version, unique per load; empty if none does."""
        instance = self.find(version)
        return "" if instance is None else f"{instance.version}.{self.versions[int(instance.version)].loads}"

    def is_pending(self, version: int) -> bool:
        """Return True if waiting may make the version, or a default one, available."""
        record = self.record(version)
        if record is not None:
            return record.is_pending
        pending = not self.settled and self.spec is not None
        return pending or (version == DEFAULT_VERSION and any(known.is_pending for known in self.versions.values()))

    def refusal(self, version: int) -> ServerError:
        """Return the error for a version that is not available."""
        record = self.record(version)
        if record is None:
            return self._missing(version)
        kind, what = self.kind.name, self._describe(version)
        if record.state >= VersionState.UNLOADING:
            return VersionRetired(f"{what} is retired", kind=kind)
        why = "" if self.kind.has_versions else record.reason
        has_failed = not self.is_pending(version)
        text = f"{what} is not loaded yet"
        if has_failed or record.failure is not None:
            text += f": its last load failed{f': {why}' if why else ''}"
        refusal = VersionLoading if self.kind.has_versions else ServiceLoading
        return refusal(text, kind=kind, has_failed=has_failed, reason=why)

    def missing(self, version: int) -> VersionMissing:
        """Return the error for an unknown version; for the default one, with the last load failure."""
        failed = [each for _, each in sorted(self.versions.items()) if each.failure is not None]
        text = f"{self._describe(version)} is not there"
        if version != DEFAULT_VERSION or not failed:
            return VersionMissing(text)
        last = failed[-1]
        text += f": the last load of version {last.version} failed: {last.reason}"
        return VersionMissing(text, tried=last.version, reason=last.reason)

    def _missing(self, version: int) -> ServerError:
        """Return the error for a version without a record; before the first pass ends, it counts as loading."""
        if not self.is_pending(version):
            return self.missing(version)
        refusal = VersionLoading if self.kind.has_versions else ServiceLoading
        return refusal(f"{self._describe(version)} is not loaded yet", kind=self.kind.name)

    def _describe(self, version: int) -> str:
        if not self.kind.has_versions:
            return f'{self.kind.name} "{self.name}"'
        which = f"version {version}" if version != DEFAULT_VERSION else "the default version"
        return f'{which} of {self.kind.name} "{self.name}"'

    def _effective_version(self, version: int) -> int:
        return version if self.kind.has_versions else ONLY_VERSION

    def available_versions(self) -> list[int]:
        """Return the available versions, ascending."""
        return sorted(version for version, record in self.versions.items() if record.instance is not None)

    def statuses(self) -> list[VersionStatus]:
        """Return the status of every version ever seen, ascending."""
        return [self.versions[version].status for version in sorted(self.versions)]

    # State changes
    def begin_load(self, version: int) -> VersionRecord:
        """Record the start of a load; a serving version stays available, a retry keeps the reason of the failure."""
        record = self.versions.setdefault(version, VersionRecord(self.name, version, self.kind))
        record.kind = self.kind
        if record.instance is None:
            record.state, record.error_code = VersionState.LOADING, OK
            record.reason = record.reason if record.failure is not None else ""
            self._announce(record)
        return record

    def finish_load(self, record: VersionRecord, instance: Instance, seconds: float) -> Instance | None:
        """Route to the new instance; return the replaced one, which must be retired."""
        replaced, record.instance = record.instance, instance
        record.state, record.error_code, record.reason = VersionState.AVAILABLE, OK, ""
        record.failure, record.load_seconds = None, seconds
        record.loads += 1
        self._route()
        self._announce(record)
        return replaced

    def fail_load(self, record: VersionRecord, reason: str, failure: Failure, seconds: float) -> None:
        """Record a failed load; the serving instance stays."""
        record.error_code, record.reason, record.failure = error_code_of(self.kind), reason, failure
        record.load_seconds = seconds
        self._announce(record)

    def clear_failure(self, record: VersionRecord) -> None:
        """Clear a failure because the settings are again those of the serving instance."""
        record.error_code, record.reason, record.failure = OK, "", None
        self._announce(record)

    def begin_retirement(self, record: VersionRecord) -> Instance | None:
        """Stop leases of a version; return its instance, which must be closed when idle."""
        retired, record.instance = record.instance, None
        record.closing += retired is not None
        record.state = VersionState.UNLOADING if record.closing else VersionState.END
        record.error_code, record.reason, record.failure = OK, "", None
        self._route()
        self._announce(record)
        return retired

    def finish_retirement(self, record: VersionRecord) -> None:
        """Record that a retired instance is closed; the version may be available again by then."""
        record.closing -= 1
        if record.state is VersionState.UNLOADING and not record.closing:
            record.state = VersionState.END
            self._announce(record)

    def touch(self) -> None:
        """Wake the tasks that wait for a change of this service."""
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
