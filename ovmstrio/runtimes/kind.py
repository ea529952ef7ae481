"""What the server has to know of a kind of service, said in one place for each.

::

    config.json ─> Kind.read ─> spec ─> Kind.depends_on ─> order of loading ─> Kind.load ─> Service
                                    └─> Kind.list_versions, Kind.files_mark ─> load again?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.hooks import NULL_METERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import trio

    from ovmstrio.core.errors import Problem
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.servable import LeaseServable, Service
    from ovmstrio.repository.versions import Listing

__all__ = ["Dependency", "Kind", "LoadContext", "Takes"]

SpecT = TypeVar("SpecT", bound=ServableSpec)
_T = TypeVar("_T")


class Takes(Enum):
    """What calls a service may take; a port of ``ovmstrio.core.servable`` each."""

    TENSORS = "tensors"
    STREAMS = "streams"
    HTTP = "HTTP routes"
    GRPC = "gRPC services"


@dataclass(frozen=True, slots=True)
class Dependency:
    """Something that a service calls by name; ``place`` says where that is written, for messages.

    With ``reloads`` the service is loaded again whenever what it calls was.
    """

    name: str
    version: str = ""
    place: Problem | None = None
    reloads: bool = False


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What the server lends to those that load.

    Attributes:
        lease: how nodes call what else is served.
        tasks: owns what services run besides their calls; outlives them.
        meters: makes the hooks by which services tell of their runs.
        hide_errors: tell clients only the type of what user code raises.
        isolates_nodes: whether custom nodes in shared libraries run in processes of their own.
        is_alone: whether nothing else is served in this process, so that user code may have its folder and environment.
    """

    lease: LeaseServable
    tasks: trio.Nursery
    meters: Meters = NULL_METERS
    hide_errors: bool = False
    isolates_nodes: bool = False
    is_alone: bool = False
    _shared: dict[Any, Any] = field(default_factory=dict)

    def shared(self, make: Callable[[], _T]) -> _T:
        """Give the server's one object of a class, such as the sequences of all models, made at first sight."""
        if make not in self._shared:
            self._shared[make] = make()
        made: _T = self._shared[make]
        return made


class Kind(ABC, Generic[SpecT]):
    """One kind of service.

    Attributes:
        name: what messages, metrics and lists call it.
        spec: what its configuration becomes.
        takes: the calls that its services take.
        has_versions: false where one version answers whatever version is asked for.
        section: the key of ``config.json`` that lists services of this kind, empty if there is none.
    """

    name: ClassVar[str]
    spec: type[SpecT]
    takes: ClassVar[frozenset[Takes]]
    has_versions: ClassVar[bool] = False
    section: ClassVar[str] = ""

    def depends_on(self, spec: SpecT) -> Sequence[Dependency]:
        """Tell what else a service calls, as far as its files say; blocking."""
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

    def examine(self, spec: SpecT) -> Sequence[Problem]:
        """Tell warnings of what a service is loaded from, which do not keep it from being loaded; blocking."""
        del spec
        return ()

    @abstractmethod
    async def load(self, spec: SpecT, version: int, directory: Path, context: LoadContext) -> Service:
        """Make a service that is ready to be called; the caller owns it and closes it.

        Raises:
            ServerError: it cannot be loaded; a ``ConfigError`` lists everything that is wrong, with its places.

        Cancellation: at any checkpoint; nothing is left.
        """
