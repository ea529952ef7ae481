"""What the registry knows of one name, model or graph: its versions, their states, and which of them answers.

The only place where a state changes.  ``serving`` is kept so that a look-up costs two dictionary accesses: it maps the
version as requests spell it to the instance that answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.errors import GraphLoading, NotFound, VersionLoading, VersionRetired
from ovmstrio.registry.files import GRAPH_VERSION
from ovmstrio.registry.states import FAILED, GRAPH_FAILED, OK, VersionState, VersionStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.errors import ServerError
    from ovmstrio.registry.leases import Instance

__all__ = ["DEFAULT_VERSION", "VERSION_MISSING", "Failure", "ModelRecord", "VersionRecord"]

DEFAULT_VERSION: Final = 0
"""The number by which requests ask for the highest version available."""

VERSION_MISSING: Final = "Model with requested version is not found"
_VERSION_RETIRED: Final = "Model with requested version is retired"
_VERSION_LOADING: Final = "Model with requested version is not loaded yet"
_GRAPH_RETIRED: Final = "Mediapipe is retired"
_GRAPH_LOADING: Final = "Mediapipe is not loaded yet"


@dataclass(frozen=True, slots=True)
class Failure:
    """A load that failed: with which settings, over which files, how often in a row, and when to try again."""

    spec: ServableSpec
    files: str
    attempts: int
    retry_at: float


@dataclass(slots=True, eq=False)
class VersionRecord:
    """One version: its state, the instance that serves it, if any, and how many retired ones are still open."""

    name: str
    version: int
    state: VersionState = VersionState.START
    error_code: str = OK
    reason: str = ""
    load_seconds: float | None = None
    instance: Instance | None = None
    failure: Failure | None = None
    closing: int = 0

    @property
    def status(self) -> VersionStatus:
        """The record as others see it."""
        return VersionStatus(
            self.name, self.version, self.state, self.error_code, self.reason, load_seconds=self.load_seconds
        )

    @property
    def is_pending(self) -> bool:
        """Whether a load is under way that may make the version available."""
        return self.state <= VersionState.LOADING and self.error_code == OK


class ModelRecord:
    """One name with all versions ever seen; ``spec`` is None once the name is not configured any more.

    What is a graph (``is_graph``, or was when it was last configured) has one version, which answers whatever version
    is asked for.  ``settled`` turns true when the first pass over the versions has ended; ``problem`` says why they
    could not even be listed.
    """

    def __init__(self, name: str, publish: Callable[[VersionStatus], None]) -> None:
        self.name = name
        self.spec: ServableSpec | None = None
        self.is_graph = False
        self.versions: dict[int, VersionRecord] = {}
        self.serving: dict[str, Instance] = {}
        self.settled = False
        self.problem = ""
        self.warnings: tuple[str, ...] = ()
        self.changed = trio.Event()
        self._publish = publish

    @property
    def kind(self) -> str:
        """What messages call it."""
        return GraphSpec.kind if self.is_graph else ModelSpec.kind

    def configure(self, spec: ServableSpec | None) -> None:
        """Note what the name is to stand for from now on; a graph that has to be loaded for that can be waited for."""
        self.settled = self.settled and self.spec is not None
        self.spec = spec
        if spec is None:
            return
        self.is_graph = isinstance(spec, GraphSpec)
        if self.is_graph:
            record = self.versions.get(GRAPH_VERSION)
            if record is None or record.state >= VersionState.UNLOADING:
                self.load_begins(GRAPH_VERSION)

    # What is asked

    def find(self, version: int) -> Instance | None:
        """Find the instance that answers for a version."""
        return self.serving.get(str(GRAPH_VERSION if self.is_graph else version))

    def record(self, version: int) -> VersionRecord | None:
        """Find what is known of a version."""
        return self.versions.get(GRAPH_VERSION if self.is_graph else version)

    def is_pending(self, version: int) -> bool:
        """Tell whether waiting may make the version, or a default one, available."""
        record = self.record(version)
        if record is not None:
            return record.is_pending
        pending = not self.settled and self.spec is not None
        return pending or (version == DEFAULT_VERSION and any(known.is_pending for known in self.versions.values()))

    def refusal(self, version: int) -> ServerError:
        """Say why a version that is not available cannot be called, in the words of OVMS."""
        record = self.record(version)
        if self.is_graph and record is not None:
            return _graph_refusal(record)
        if record is None:
            return VersionLoading(_VERSION_LOADING) if self.is_pending(version) else NotFound(self._missing(version))
        if record.state >= VersionState.UNLOADING:
            return VersionRetired(_VERSION_RETIRED)
        return VersionLoading(_VERSION_LOADING if record.is_pending else f"{_VERSION_LOADING}: its last load failed")

    def _missing(self, version: int) -> str:
        """Say that a version is not there, and of the default one why nothing can stand for it."""
        failed = [each for each in self.versions.values() if each.failure is not None]
        if version != DEFAULT_VERSION or not failed:
            return VERSION_MISSING
        return f"{VERSION_MISSING} - the last load of version {failed[-1].version} failed: {failed[-1].reason}"

    def available_versions(self) -> list[int]:
        """List the versions that can be called, ascending."""
        return sorted(version for version, record in self.versions.items() if record.instance is not None)

    def statuses(self) -> list[VersionStatus]:
        """List every version ever seen, ascending."""
        return [self.versions[version].status for version in sorted(self.versions)]

    # What happens

    def load_begins(self, version: int) -> VersionRecord:
        """Note that a load has begun; a version that serves stays available."""
        record = self.versions.setdefault(version, VersionRecord(self.name, version))
        if record.instance is None:
            record.state, record.error_code, record.reason = VersionState.LOADING, OK, ""
            self._announce(record)
        return record

    def load_succeeds(self, record: VersionRecord, instance: Instance, seconds: float) -> Instance | None:
        """Let the new instance answer from now on; what it replaces is returned, to be retired."""
        replaced, record.instance = record.instance, instance
        record.state, record.error_code, record.reason = VersionState.AVAILABLE, OK, ""
        record.failure, record.load_seconds = None, seconds
        self._route()
        self._announce(record)
        return replaced

    def load_fails(self, record: VersionRecord, reason: str, failure: Failure, seconds: float) -> None:
        """Note why a load failed; what was served goes on."""
        record.error_code, record.reason, record.failure = GRAPH_FAILED if self.is_graph else FAILED, reason, failure
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


def _graph_refusal(record: VersionRecord) -> ServerError:
    if record.state >= VersionState.UNLOADING:
        return VersionRetired(_GRAPH_RETIRED)
    if record.is_pending:
        return GraphLoading(_GRAPH_LOADING)
    return GraphLoading(f"{_GRAPH_LOADING}: its last load failed: {record.reason}")
