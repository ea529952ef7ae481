"""A loaded Python node: its ``OvmsPythonModel``, from the import of its file to ``finalize``, and its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.runtimes.graphs.calculator import DefinitionScope, NodeFailure
from ovmstrio.runtimes.graphs.calculators.python.node_in_processes import NodeInProcesses
from ovmstrio.runtimes.graphs.calculators.python.node_in_threads import NodeInThreads
from ovmstrio.runtimes.graphs.calculators.python.node_model import FAILED, NodeOutline
from ovmstrio.runtimes.graphs.calculators.python.python_contract import has_loopback
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.runtimes.graphs.packets import REQUEST_PAYLOAD, RESPONSE_PAYLOAD
from ovmstrio.work.processes import WorkerEnded
from ovmstrio.work.user_code.calls import UserCodeRaisedError
from ovmstrio.work.user_code.importing import ROOT
from ovmstrio.work.user_code.places import SourceLine, at_place, describe, missing_module_fix, place_in, trimmed

__all__ = ["EXECUTION_ERROR", "FINALIZE_SECONDS", "NodeHandler", "UserCode"]

log = structlog.get_logger(__name__)

FINALIZE_SECONDS: Final = 10.0
"""How long ``finalize`` may take."""
_PACKAGE: Final = re.compile(rf"\b{re.escape(ROOT)}\.n\d+\.")
"""The names of packages that handlers are loaded in, of which users know nothing."""


class NodeHandler:
    """The user's object behind a Python node, from its import to its end.

    Attributes:
        code: where it lives.
    """

    def __init__(self, node: NodeConfig, file: Path, scope: DefinitionScope) -> None:
        self.node = node
        self.grace_seconds = scope.threads.grace_seconds
        self.has_loopback = has_loopback(node)
        self.input_count = len(node.inputs) - self.has_loopback
        self.user_code = UserCode(scope.graph, node.name, file.parent, hide_errors=scope.hide_errors)
        self.code = _code_of(node, file, scope)
        self._file = file

    @property
    def model(self) -> Any:
        """The user's object, where it is in this process; None before it is made and after the end."""
        return self.code.made.model if isinstance(self.code, NodeInThreads) else None

    # Life

    async def load(self) -> None:
        """Import the file, make the object and initialize it.

        Raises:
            ConfigError: any of these fails.

        Cancellation: as :meth:`WorkerThreads.call`, or at once; the caller closes what was made.
        """
        try:
            await self.code.load()
        except UserCodeRaisedError as raised:
            if isinstance(raised.error, ConfigError):
                raise raised.error from None
            raise self._failed(raised.error) from None
        except (WorkerEnded, OSError) as error:
            message = f"Error during python node initialization for handler_path: {self._file} - its worker process"
            raise self._problem(f"{message} {error}") from None

    async def aclose(self) -> None:
        """Finalize the object, if there is one, and forget its modules; errors are logged.

        Cancellation: shielded, for ``FINALIZE_SECONDS`` and the pool's grace.
        """
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FINALIZE_SECONDS) as scope:
            try:
                await self.code.finalize()
            except UserCodeRaisedError as raised:
                self.user_code.report(raised.error, "finalize")
            except RuntimeError as error:
                log.error("finalize cannot run", reason=str(error), **self._names())  # noqa: TRY400 - no bug of its own
        if scope.cancelled_caught:
            log.error("finalize did not end in time", seconds=FINALIZE_SECONDS, **self._names())
        with trio.CancelScope(shield=True):
            await self.code.aclose()

    # Words

    def _failed(self, error: BaseException) -> ConfigError:
        self.user_code.report(error, "loading")
        place = self.user_code.place(error)
        reason = _PACKAGE.sub("", describe(error))
        message = f"Error during python node initialization for handler_path: {self._file} - {reason}"
        return self._problem(message, place, missing_module_fix(error))

    def _problem(self, message: str, place: SourceLine | None = None, fix: str = "") -> ConfigError:
        file, line = (str(self._file), None) if place is None else place
        path = f"node {self.node.name!r}"
        return ConfigError([Problem(f"{FAILED} - {message}", file=file, line=line, path=path, suggestion=fix)])

    def _names(self) -> dict[str, str]:
        return {"servable": self.user_code.graph, "node": self.node.name}


def _code_of(node: NodeConfig, file: Path, scope: DefinitionScope) -> NodeInThreads | NodeInProcesses:
    inputs, outputs = ([ref.name for ref in refs] for refs in (node.inputs, node.outputs))
    documents = next((ref.name for ref in node.outputs if ref.port.tag in {RESPONSE_PAYLOAD, REQUEST_PAYLOAD}), "")
    outline = NodeOutline(node.name, str(file), inputs, outputs, has_loopback(node), documents)
    ports = {ref.name: ref.port for ref in node.outputs}
    if scope.isolation is None or scope.tasks is None:
        return NodeInThreads(outline, ports, scope.threads, scope.graph)
    return NodeInProcesses(outline, ports, scope.isolation, scope.tasks, scope.graph)


EXECUTION_ERROR: Final = "Error occurred during graph execution"


class UserCode:
    """Whose code it is that fails: names for the log, the folder in which its files lie."""

    __slots__ = ("folder", "graph", "hide_errors", "node")

    def __init__(self, graph: str, node: str, folder: Path, *, hide_errors: bool = False) -> None:
        self.graph = graph
        self.node = node
        self.folder = folder
        self.hide_errors = hide_errors

    def failure(
        self, error: BaseException, step: str, *, request_id: str = "", otherwise: SourceLine | None = None
    ) -> Exception:
        """Log what user code raised and make of it what is raised instead: errors of the server's own pass unchanged.

        ``otherwise`` is the place to name where no line of the user's was reached.
        """
        self.report(error, step, request_id=request_id)
        if isinstance(error, ServerError):
            return error
        told = type(error).__name__ if self.hide_errors else at_place(describe(error), self.place(error) or otherwise)
        return NodeFailure(f"{EXECUTION_ERROR}: {told}")

    def report(self, error: BaseException, step: str, *, request_id: str = "") -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        log.error(
            "a Python node raised",
            step=step,
            servable=self.graph,
            node=self.node,
            request_id=request_id,
            exc_info=(type(error), error, trimmed(error)),
        )

    def wrong(self, problem: object) -> NodeFailure:
        """Make the failure of user code that gave back something wrong."""
        return NodeFailure(EXECUTION_ERROR if self.hide_errors else f"{EXECUTION_ERROR}: {problem}")

    def place(self, error: BaseException) -> SourceLine | None:
        """Give the line of the user's that an error comes from: the innermost in the handler's folder."""
        return place_in(self.folder, error)
