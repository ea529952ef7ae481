"""A loaded Python node: its ``OvmsPythonModel``, from the import of its file to ``finalize``, and its errors."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.runtimes.graphs.calculator import DefinitionScope, NodeFailure
from ovmstrio.runtimes.graphs.calculators.python.python_contract import has_loopback
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_user_code
from ovmstrio.work.user_code.importing import HandlerPackage
from ovmstrio.work.user_code.places import SourceLine, at_place, describe, missing_module_fix, place_in, trimmed

__all__ = ["EXECUTION_ERROR", "FINALIZE_SECONDS", "NodeHandler", "UserCode"]

log = structlog.get_logger(__name__)

FINALIZE_SECONDS: Final = 10.0
"""How long ``finalize`` may take."""
_CLASS: Final = "OvmsPythonModel"
_FAILED: Final = "The Python Node state initialization failed"


class NodeHandler:
    """The user's object behind a Python node, from its import to its end.

    Attributes:
        model: the user's object, None before it is made and after the end.
        open_hook: its method ``open(context)``, if it has one; the same of ``close_hook``.
    """

    def __init__(self, node: NodeConfig, file: Path, scope: DefinitionScope) -> None:
        self.node = node
        self.threads = scope.threads
        self.grace_seconds = scope.threads.grace_seconds
        self.ports = {ref.name: ref.port for ref in node.outputs}
        self.has_loopback = has_loopback(node)
        self.input_count = len(node.inputs) - self.has_loopback
        self.user_code = UserCode(scope.graph, node.name, file.parent, hide_errors=scope.hide_errors)
        self.model: Any = None
        self.open_hook: Callable[..., Any] | None = None
        self.close_hook: Callable[..., Any] | None = None
        self._file = file
        self._package: HandlerPackage | None = None
        self._is_initializing = False

    # Life

    async def load(self) -> None:
        """Import the file, make the object and initialize it.

        Raises:
            ConfigError: any of these fails.

        Cancellation: as :meth:`WorkerThreads.call`; the caller closes what was made.
        """
        context = contextvars.copy_context()
        try:
            await call_user_code(self.threads, self._make_model, context=context)
            if self._method("initialize") is not None:
                self._is_initializing = True
                await call_user_code(self.threads, self._initialize, context=context)
        except UserCodeRaisedError as raised:
            if isinstance(raised.error, ConfigError):
                raise raised.error from None
            raise self._failed(raised.error) from None

    async def aclose(self) -> None:
        """Finalize the object, if there is one, and forget its modules; errors are logged.

        Cancellation: shielded, for ``FINALIZE_SECONDS`` and the pool's grace.
        """
        model, finalize = self.model, self._method("finalize")
        self.model = None
        if model is not None and finalize is not None:
            if self._is_initializing:
                log.error("finalize is not run: initialize has not ended", **self._names())
            else:
                await self._finalize(finalize)
        if self._package is not None:
            self._package.unload()
            self._package = None

    async def _finalize(self, finalize: Callable[[], Any]) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FINALIZE_SECONDS) as scope:
            try:
                await call_user_code(self.threads, finalize, context=contextvars.copy_context())
            except UserCodeRaisedError as raised:
                self.user_code.report(raised.error, "finalize")
            except RuntimeError as error:
                log.error("finalize cannot run", reason=str(error), **self._names())  # noqa: TRY400 - no bug of its own
        if scope.cancelled_caught:
            log.error("finalize did not end in time", seconds=FINALIZE_SECONDS, **self._names())

    # What it has

    def _method(self, name: str) -> Callable[..., Any] | None:
        method: Callable[..., Any] | None = getattr(self.model, name, None)
        return method

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Give a method that takes a ``context``; one that does not is the user's own affair."""
        method = self._method(name)
        try:
            parameters = [] if method is None else list(inspect.signature(method).parameters)
        except (TypeError, ValueError):
            return None
        return method if parameters == ["context"] else None

    # Loading, in a worker thread

    def _make_model(self) -> None:
        self._package = HandlerPackage(self._file.parent)
        module = self._package.load(self._file)
        made = getattr(module, _CLASS, None)
        if made is None:
            fix = f"define class {_CLASS} with a method execute(self, inputs)"
            raise self._problem(f"No {_CLASS} class found in {self._file}", fix=fix)
        if not callable(getattr(made, "execute", None)):
            raise self._problem(
                f"{_CLASS} class defined in {self._file} does not implement execute method.",
                fix="define execute(self, inputs)",
            )
        self.model = made()
        self.open_hook, self.close_hook = self._hook("open"), self._hook("close")

    def _initialize(self) -> Any:
        result = None
        try:
            result = self.model.initialize(self._arguments())
        finally:
            self._is_initializing = inspect.iscoroutine(result)
        return self._awaited(result) if inspect.iscoroutine(result) else None

    async def _awaited(self, result: Any) -> None:
        try:
            await result
        finally:
            self._is_initializing = False

    def _arguments(self) -> dict[str, Any]:
        outputs = [ref.name for ref in self.node.outputs]
        return {
            "node_name": self.node.name,
            "input_names": [ref.name for ref in self.node.inputs],
            "output_names": outputs,
            "outputs_names": list(outputs),
            "base_path": str(self._file.parent),
        }

    # Words

    def _failed(self, error: BaseException) -> ConfigError:
        step = "initialize" if self.model is not None else "the import or the constructor"
        self.user_code.report(error, step)
        place = self.user_code.place(error)
        package = "" if self._package is None else f"{self._package.name}."
        reason = describe(error).replace(package, "")
        message = f"Error during python node initialization for handler_path: {self._file} - {reason}"
        return self._problem(message, place, missing_module_fix(error))

    def _problem(self, message: str, place: SourceLine | None = None, fix: str = "") -> ConfigError:
        file, line = (str(self._file), None) if place is None else place
        path = f"node {self.node.name!r}"
        return ConfigError([Problem(f"{_FAILED} - {message}", file=file, line=line, path=path, suggestion=fix)])

    def _names(self) -> dict[str, str]:
        return {"graph": self.user_code.graph, "node": self.node.name}


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
            graph=self.graph,
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
