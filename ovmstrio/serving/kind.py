"""Service kinds: everything that the server must know about one kind of service, in one class.

::

    config.json ─> Kind.read ─> spec ─> Kind.depends_on ─> load order ─> Kind.load ─> Service
                                    └─> Kind.list_versions, Kind.fingerprint ─> reload?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import ServiceMissing
from ovmstrio.core.generation import MediaPolicy
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.limits import ConcurrencyLimit, make_local_limit
from ovmstrio.core.service import NO_INTROSPECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    import trio

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.payloads import TextApiAdapter
    from ovmstrio.core.service import Detection, Introspection, ServableLookup, Service
    from ovmstrio.core.tracing import StartRootSpan
    from ovmstrio.core.worker_peers import EngineDirectory, SequenceOwners
    from ovmstrio.serving.model_versions import Listing

SpecT = TypeVar("SpecT", bound=ServableSpec)
_T = TypeVar("_T")


class CallType(Enum):
    """Call types that a service accepts."""

    TENSORS = "tensors"
    STREAMS = "streams"
    HTTP = "HTTP routes"
    GRPC = "gRPC services of its own"
    PAYLOADS = "requests over HTTP as they are"
    GENERATION = "text to be made, or made into something"

    # Hot path: each call tests membership, and ``Enum.__hash__`` is a Python function.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Dependency:
    """A service that another one calls by name, at a version or the default one.

    ``place`` is where the name is written: a missing callee is then a warning there, otherwise a load error.  With
    ``reloads``, the caller is reloaded whenever the callee is.
    """

    name: str
    version: str = ""
    place: Problem | None = None
    reloads: bool = False


def ignore_warning(_: Problem) -> None:
    """Ignore a load-time warning."""


def ignore_detection(_: Detection) -> None:
    """Ignore a detected setting."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Services of the server for loading code.

    Attributes:
        lease: calls other services.
        tasks: nursery for background tasks of services; outlives them.
        hide_errors: send clients only the type of user-code exceptions.
        isolates_python: run user Python code in separate processes, unless the service says otherwise.
        python_memory_limit: memory limit of each such process in bytes; 0 for none.
        isolates_nodes: run custom-node libraries in separate processes.
        is_trial: a configuration check: the loaded service is closed without a call.
        is_alone: no other service is in this process, so user code may change directory and environment.
        queue_timeout: longest wait of handler calls for a thread, in seconds; 0 for no limit.
        max_queue_time: longest wait of calls of services with their own queue, in seconds; None for no limit.
        make_limit: creates the concurrency limit of a service from a maximum and its name.
        names: all configured names, for suggestions.
        warn: receives load-time warnings.
        detect: receives settings that loading detected.
        sequence_owners: sequences of other workers; None with a single worker.
        engines: text engines shared between workers; None with a single worker.
        text_api: creates the HTTP request parser for text nodes of graphs; None where there is no HTTP.
        start_root_span: starts spans of requests that services make outside of calls; None without tracing.
        media: sources of the images that messages of requests name.
    """

    lease: ServableLookup
    tasks: trio.Nursery
    meters: Meters = NULL_METERS
    hide_errors: bool = False
    isolates_python: bool = False
    python_memory_limit: int = 0
    isolates_nodes: bool = False
    is_trial: bool = False
    is_alone: bool = False
    queue_timeout: float = 0
    max_queue_time: float | None = None
    make_limit: Callable[[int, str], ConcurrencyLimit | None] = make_local_limit
    names: Collection[str] = ()
    warn: Callable[[Problem], None] = ignore_warning
    detect: Callable[[Detection], None] = ignore_detection
    sequence_owners: SequenceOwners | None = None
    engines: EngineDirectory | None = None
    text_api: Callable[[], TextApiAdapter] | None = None
    start_root_span: StartRootSpan | None = None
    media: MediaPolicy = field(default_factory=MediaPolicy)
    _shared: dict[Any, Any] = field(default_factory=dict)

    def shared(self, make: Callable[[], _T]) -> _T:
        """Return the server-wide object that ``make`` creates, such as the sequences of all models."""
        if make not in self._shared:
            self._shared[make] = make()
        result: _T = self._shared[make]
        return result

    def share(self, *parts: object) -> None:
        """Provide server-wide objects by their class; None is ignored."""
        self._shared.update({type(part): part for part in parts if part is not None})

    def find(self, kind: type[_T]) -> _T | None:
        """Return the server-wide object of a class; None if the server provides none."""
        return self._shared.get(kind)


async def lease_nothing(name: str, version: str = "", /) -> NoReturn:
    """Raise ``ServiceMissing``: the lease function where a service is loaded alone."""
    del version
    raise ServiceMissing(f'nothing is served under the name "{name}"')


class Kind(ABC, Generic[SpecT]):
    """One kind of service.

    Attributes:
        name: name in messages, metrics and lists.
        spec: class of its configuration entries.
        call_types: call types of its services.
        has_versions: false if one version answers for every requested version.
        loads_with: module that loading imports, imported early at server start; empty if none or cheap.
        imports: loading runs a user program, so checks use another process or skip it.
        section: key of the service list in ``config.json``; empty if there is none.
        further_sections: keys of other lists that it reads.
        reports_all_problems: loading an invalid entry during a check finds its further problems, and then fails.
        runs_user_code: its services may run user code, which may bring its own instrumentation.
        fills_cores: its services compute on this machine, so models cannot use all cores.
        occupied: error text for a name taken by another kind.
    """

    name: ClassVar[str]
    spec: type[SpecT]
    call_types: ClassVar[frozenset[CallType]]
    has_versions: ClassVar[bool] = False
    loads_with: ClassVar[str] = ""
    imports: ClassVar[bool] = False
    section: ClassVar[str] = ""
    further_sections: ClassVar[tuple[str, ...]] = ()
    reports_all_problems: ClassVar[bool] = False
    runs_user_code: ClassVar[bool] = True
    fills_cores: ClassVar[bool] = False
    occupied: ClassVar[str] = "The name is taken"

    def read(self, file: ConfigFile) -> Sequence[ServableSpec]:
        """Read the entries of a configuration file; an entry may become a spec of another kind."""
        del file
        return ()

    def depends_on(self, spec: SpecT) -> Sequence[Dependency]:
        """Return the dependencies found in settings and files, without the service itself; blocking."""
        del spec
        return ()

    @abstractmethod
    def list_versions(self, spec: SpecT) -> Listing:
        """List the versions that could be loaded; blocking.  A kind without versions always lists one.

        Raises:
            ConfigError: the settings are invalid, or the versions cannot be listed.
        """

    @abstractmethod
    def fingerprint(self, spec: SpecT, directory: Path) -> str:
        """Return a fingerprint of all files of a version; blocking."""

    def check_change(self, spec: SpecT, served: Sequence[ServableSpec]) -> None:
        """Check that a new entry may replace the served one, of whatever kind.

        Raises:
            ConfigError: the change would break clients.
        """
        del spec, served

    def examine(self, spec: SpecT) -> Sequence[Problem]:
        """Return the problems that a configuration check finds without running user code; blocking.

        Errors among them are raised again by loading.
        """
        del spec
        return ()

    def place(self, spec: SpecT, problem: Problem, directory: Path | None) -> Problem:
        """Return a problem with its place in the configuration; ``directory`` is None for a listing problem."""
        del directory
        return spec.placed(problem)

    @abstractmethod
    async def load(self, spec: SpecT, version: int, directory: Path, context: LoadContext) -> Service:
        """Create a service ready for calls, which the caller must close.

        Raises:
            ServerError: loading failed; a ``ConfigError`` lists all problems with their places.
        """

    def unready_reason(self, service: Service) -> str:
        """Return why a loaded service is unready, such as a dead worker; empty if it is ready."""
        del service
        return ""

    def look_inside(self, spec: SpecT, service: Service) -> Introspection:
        """Return the structure and counters of a loaded service, for introspection."""
        del spec, service
        return NO_INTROSPECTION

    def begin_drain(self, service: Service) -> None:
        """Make a service refuse queued and new calls because the server is shutting down; running calls go on."""
        del service
