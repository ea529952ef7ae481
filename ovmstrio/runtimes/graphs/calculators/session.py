"""OpenVINOModelServerSessionCalculator: a side packet through which nodes call what else is served."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.errors import ConfigError, FailedPrecondition, NotFound, NotReady, Problem
from ovmstrio.runtimes.graphs.calculator import (
    CalculatorKind,
    ContractError,
    DefinitionScope,
    NodeContext,
    NodeContract,
)
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, options_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from ovmstrio.runtimes.kind import Dependency

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.core.servable import LeaseServable

__all__ = ["SESSION", "SESSION_PORT", "Session", "find_calls"]

log = structlog.get_logger(__name__)

SESSION_PORT: Final = Port("SESSION", 0)
_OPTIONS: Final = "mediapipe.OpenVINOModelServerSessionCalculatorOptions"
_PRECONDITION: Final = "Mediapipe graph precondition failed - FAILED_PRECONDITION: CalculatorGraph::Run() failed: \n"
_NOT_LOADED: Final = "OpenVINOModelServerSessionCalculator failed to load the model"


class Session:
    """Calls one servable by name; each call goes to what is served under it at that moment.

    Args:
        lease: how servables are leased.
        servable: the name.
        version: as in a request; empty for the default version.
        node: the canonical name of the node whose session this is.
    """

    __slots__ = ("_lease", "_node", "servable", "version")

    def __init__(self, lease: LeaseServable, servable: str, version: str, node: str) -> None:
        self._lease = lease
        self._node = node
        self.servable = servable
        self.version = version

    async def check(self) -> None:
        """See that the servable is there.

        Raises:
            FailedPrecondition: it is not served, or not loaded.

        Cancellation: while the registry waits for the servable to load; nothing is held.
        """
        try:
            with await self._lease(self.servable, self.version):
                return
        except (NotFound, NotReady) as error:
            raise self._missing("Open", error) from error

    async def infer(self, request: InferRequest) -> InferResponse:
        """Have one request answered, under a lease that ends with the answer.

        Raises:
            FailedPrecondition: the servable is not served any more.
            ServerError: as the servable's own ``infer``.

        Cancellation: as the servable's own ``infer``; the lease is given back.
        """
        try:
            lease = await self._lease(self.servable, self.version)
        except (NotFound, NotReady) as error:
            raise self._missing("Process", error) from error
        with lease as held:
            return await held.servable.infer(request)

    def _missing(self, phase: str, error: NotFound | NotReady) -> FailedPrecondition:
        log.warning("session finds no servable", servable=self.servable, version=self.version, reason=error.message)
        where = f'Calculator::{phase}() for node "{self._node}" failed: {_NOT_LOADED}'
        return FailedPrecondition(f'{_PRECONDITION}{where} "{self.servable}": {error.message}')


class _SessionResources:
    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    async def open(self, context: NodeContext) -> _Open:
        """Give the session as side packet.

        Raises:
            FailedPrecondition: the servable is not there.

        Cancellation: as :meth:`Session.check`.
        """
        await self._session.check()
        context.emit_side(SESSION_PORT, self._session)
        return _Open()

    async def aclose(self) -> None:
        """Nothing to do; sessions hold leases only while they call.  Never waits."""


class _Open(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Nothing to do; the node has no streams.  Never waits."""


class _SessionKind:
    name: str = "OpenVINOModelServerSessionCalculator"

    def contract(self, node: NodeConfig) -> NodeContract:
        """Accept no streams and the one side output ``SESSION``.

        Raises:
            ContractError: there are others, or the options name no servable.
        """
        if node.inputs or node.outputs or node.side_inputs:
            raise ContractError(f"{self.name} has neither streams nor input side packets", fix="remove them")
        if [ref.port for ref in node.side_outputs] != [SESSION_PORT]:
            raise ContractError(
                f"{self.name} has exactly one output side packet, SESSION",
                fix='write output_side_packet: "SESSION:session"',
            )
        _address(node)
        return NodeContract(side_outputs={SESSION_PORT: Session})

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> _SessionResources:
        """Share one session.  Never waits; the servable may come later.

        Raises:
            ConfigError: the graph would call itself.
        """
        servable, version = _address(node)
        if servable == scope.graph:
            message = f"graph {scope.graph!r} would call itself: servable_name is its own name"
            raise ConfigError([Problem(message, line=node.line or None, path=node.canonical_name)])
        return _SessionResources(Session(scope.lease, servable, version, node.canonical_name))


def _address(node: NodeConfig) -> tuple[str, str]:
    """Give name and version of the servable; a version that is no number is the default one, as in OVMS."""
    options = options_of(node, _OPTIONS)
    if options is None or not options.servable_name:
        raise ContractError(
            "the options name no servable",
            fix=f'add node_options {{ [type.googleapis.com/{_OPTIONS}]: {{ servable_name: "..." }} }}',
        )
    version = options.servable_version
    return options.servable_name, version if version.isascii() and version.isdecimal() else ""


def find_calls(content: str, file: str) -> list[Dependency]:
    """Find what the sessions of a graph call; those whose options cannot be used call nothing.

    Args:
        content: of the graph's file.
        file: for messages.
    """
    config = examine_text(content, file).config
    calls = []
    for node in config.nodes if config is not None else ():
        if node.calculator != _SessionKind.name:
            continue
        with suppress(ContractError):
            name, version = _address(node)
            place = Problem(
                f"the session {node.canonical_name!r} calls {name!r}", file, node.options_line or node.line or None
            )
            calls.append(Dependency(name, version, place))
    return calls


SESSION: Final[CalculatorKind] = _SessionKind()
