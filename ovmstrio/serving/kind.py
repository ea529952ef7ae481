"""What the server has to know of a kind of service, said in one place for each.

::

    config.json ─> Kind.read ─> spec ─> Kind.depends_on ─> order of loading ─> Kind.load ─> Service
                                    └─> Kind.list_versions, Kind.files_mark ─> load again?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import ServiceMissing
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.limits import ConcurrencyLimit, local_limit
from ovmstrio.core.service import NOTHING_INSIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    import trio

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.service import Inside, LeaseServable, Service, TextApi
    from ovmstrio.core.worker_peers import EngineSharing, SequenceOwners
    from ovmstrio.serving.model_versions import Listing

__all__ = ["Dependency", "Kind", "LoadContext", "Takes", "lease_nothing"]

SpecT = TypeVar("SpecT", bound=ServableSpec)
_T = TypeVar("_T")


class Takes(Enum):
    """What calls a service may take; a port of ``ovmstrio.core.service``, ``.generation`` or ``.payloads`` each."""

    TENSORS = "tensors"
    STREAMS = "streams"
    HTTP = "HTTP routes"
    GRPC = "gRPC services of its own"
    PAYLOADS = "requests over HTTP as they are"
    GENERATION = "text to be made, or made into something"

    # Every call looks for one among those of its service; the hash of ``Enum`` is a function of Python's.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Dependency:
    """Something that a service calls by name, of a version, or of the default one.

    With ``place``, which says where the name is written, a warning tells that nothing of the name is configured;
    without it loading fails for want of it, and says so.  With ``reloads`` the service is loaded again whenever what
    it calls was.
    """

    name: str
    version: str = ""
    place: Problem | None = None
    reloads: bool = False


def ignore_remark(_: Problem) -> None:
    """Forget what is odd with what is loaded all the same."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What the server lends to those that load.

    Attributes:
        lease: how nodes call what else is served.
        tasks: owns what services run besides their calls; outlives them.
        meters: makes the hooks by which services tell of their runs.
        hide_errors: tell clients only the type of what user code raises.
        isolates_python: whether Python code of users runs in processes of its own, where its service does not say.
        python_memory_limit: how many bytes of memory each of these processes may have; 0 for any number.
        isolates_nodes: whether custom nodes in shared libraries run in processes of their own.
        is_trial: whether what is loaded is closed again without a call, as a check does.
        is_alone: whether nothing else is served in this process, so that user code may have its folder and environment.
        queue_timeout: for how many seconds calls of handlers wait for a thread; 0 for any time.
        make_limit: makes what counts the requests of a service, by its name, that may have so many in flight; None if
            nobody does.
        names: what else is configured, for those that miss something by its name.
        remark: is told what is odd with what is loaded all the same, by the load that this is lent to.
        sequence_owners: has the sequences that are in other processes of the server; None if there are none.
        engines: those that other processes of the server have, or share with this one; None if there are none.
        text_api: makes what reads requests over HTTP for nodes of graphs that make text; None where nobody can ask.
    """

    lease: LeaseServable
    tasks: trio.Nursery
    meters: Meters = NULL_METERS
    hide_errors: bool = False
    isolates_python: bool = False
    python_memory_limit: int = 0
    isolates_nodes: bool = False
    is_trial: bool = False
    is_alone: bool = False
    queue_timeout: float = 0
    make_limit: Callable[[int, str], ConcurrencyLimit | None] = local_limit
    names: Collection[str] = ()
    remark: Callable[[Problem], None] = ignore_remark
    sequence_owners: SequenceOwners | None = None
    engines: EngineSharing | None = None
    text_api: Callable[[], TextApi] | None = None
    _shared: dict[Any, Any] = field(default_factory=dict)

    def shared(self, make: Callable[[], _T]) -> _T:
        """Give the server's one object of a class, such as the sequences of all models, made at first sight."""
        if make not in self._shared:
            self._shared[make] = make()
        made: _T = self._shared[make]
        return made


async def lease_nothing(name: str, version: str = "", /) -> NoReturn:
    """Lease nothing, where a service is loaded alone.

    Raises:
        ServiceMissing: always.
    """
    del version
    raise ServiceMissing(f'nothing is served under the name "{name}"')


class Kind(ABC, Generic[SpecT]):
    """One kind of service.

    Attributes:
        name: what messages, metrics and lists call it.
        spec: what its configuration becomes.
        takes: the calls that its services take.
        has_versions: false where one version answers whatever version is asked for.
        loads_with: the module that loading imports when it is first needed, which servers import before whatever is
            left when they start; empty if there is none, or a light one.
        imports: whether loading runs a program of the user's, which a check does in another process or not at all.
        section: the key of ``config.json`` that lists services of this kind, empty if there is none.
        further_sections: the keys of other lists that it reads.
        tells_all: whether loading what has errors in its settings, which a check does, tells all else that is wrong as
            well, and then fails.
        runs_user_code: whether its services may run code of users, which may bring instrumentation of its own.
        fills_cores: whether its services compute in this process or in processes of their own, so that models beside
            them do not have the cores for themselves.
        occupied: what is said of a service whose name another kind has taken.
    """

    name: ClassVar[str]
    spec: type[SpecT]
    takes: ClassVar[frozenset[Takes]]
    has_versions: ClassVar[bool] = False
    loads_with: ClassVar[str] = ""
    imports: ClassVar[bool] = False
    section: ClassVar[str] = ""
    further_sections: ClassVar[tuple[str, ...]] = ()
    tells_all: ClassVar[bool] = False
    runs_user_code: ClassVar[bool] = True
    fills_cores: ClassVar[bool] = False
    occupied: ClassVar[str] = "The name is taken"

    def read(self, file: ConfigFile) -> Sequence[ServableSpec]:
        """Read what a configuration file says of services of this kind; of two with one name the first counts.

        An entry may turn out to be one of another kind.
        """
        del file
        return ()

    def depends_on(self, spec: SpecT) -> Sequence[Dependency]:
        """Tell what else a service calls, as far as its settings and files say; itself is left out; blocking."""
        del spec
        return ()

    @abstractmethod
    def list_versions(self, spec: SpecT) -> Listing:
        """List the versions that could be loaded; blocking.  What has only one has it even where its files are missing.

        Raises:
            ConfigError: the settings cannot be used, or the versions not be listed.
        """

    @abstractmethod
    def files_mark(self, spec: SpecT, directory: Path) -> str:
        """Give a mark of all that a version is loaded from, which changes when any of it does; blocking."""

    def check_change(self, spec: SpecT, served: Sequence[ServableSpec]) -> None:
        """See that what is served under a name, of whatever kind, may be replaced.

        Raises:
            ConfigError: clients would fail.
        """
        del spec, served

    def examine(self, spec: SpecT) -> Sequence[Problem]:
        """Tell all that is odd or wrong with what a service is loaded from, without running user code; blocking.

        For checks: errors among it are told again by loading.
        """
        del spec
        return ()

    def place(self, spec: SpecT, problem: Problem, directory: Path | None) -> Problem:
        """Say where a problem can be mended that loading a version told, or listing them if there is no directory."""
        del directory
        return spec.placed(problem)

    @abstractmethod
    async def load(self, spec: SpecT, version: int, directory: Path, context: LoadContext) -> Service:
        """Make a service that is ready to be called; the caller owns it and closes it.

        Raises:
            ServerError: it cannot be loaded; a ``ConfigError`` lists everything that is wrong, with its places.

        Cancellation: at any checkpoint; nothing is left.
        """

    def obstacle(self, service: Service) -> str:
        """Tell why a service that is loaded cannot answer now, such as a worker that died; empty if it can."""
        del service
        return ""

    def look_inside(self, spec: SpecT, service: Service) -> Inside:
        """Tell what a loaded service has inside, and what that counts; for those who look, again and again."""
        del spec, service
        return NOTHING_INSIDE

    def begin_drain(self, service: Service) -> None:
        """Have a service refuse what waits in it and what still comes, for the server ends; calls under way go on."""
        del service
