"""The user's object behind a Python node, in whichever thread or process: made of its file, and initialized.

Needs nothing that is installed, so that it can be used under any interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.work.user_code.importing import HandlerPackage

__all__ = ["FAILED", "HookPair", "NodeModel", "NodeOutline"]

FAILED: Final = "The Python Node state initialization failed"
_CLASS: Final = "OvmsPythonModel"


class NodeOutline(NamedTuple):
    """What an object is told of its node, and where it comes from; plain data.

    Attributes:
        node: the node's name.
        file: the handler's.
        inputs: the names of the streams, in the order of the graph's file.
        outputs: the same.
        has_loopback: whether there is a cycle, as generators need it.
        documents: the name of the output that takes documents as they are; empty if there is none.
    """

    node: str
    file: str
    inputs: list[str]
    outputs: list[str]
    has_loopback: bool
    documents: str = ""


class HookPair:
    """Sees that ``close`` of one call or stream runs if ``open`` has begun, and that this does not begin later.

    A caller may leave while the hook waits for a thread.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> bool:
        """Note that ``open`` runs, or would if there were one; False if it must not any more."""
        self._has_begun = not self._has_ended
        return self._has_begun

    def end(self) -> bool:
        """Note that ``close`` is due, and tell whether it is to run."""
        self._has_ended = True
        return self._has_begun

    def opening(self, hook: Callable[..., Any]) -> Callable[[Any], Any]:
        """Give what runs a hook ``open``, on the event loop if that is where it runs."""
        if inspect.iscoroutinefunction(hook):

            async def begin_async(context: Any) -> None:
                if self.begin():
                    await hook(context)

            return begin_async
        return lambda context: hook(context) if self.begin() else None


class NodeModel:
    """One object, from the import of its file on.

    Args:
        outline: what it is made of.

    Attributes:
        model: the user's object, None before it is made and after the end.
        is_initializing: whether ``initialize`` runs.
    """

    def __init__(self, outline: NodeOutline) -> None:
        self.model: Any = None
        self.is_initializing = False
        self.hooks: dict[str, Callable[..., Any]] = {}
        self._outline = outline
        self._package: HandlerPackage | None = None

    def make(self) -> None:
        """Import the file and make the object; blocking.

        Raises:
            ConfigError: it has no class, or one without ``execute``.
            BaseException: what the user's code raises.
        """
        file = Path(self._outline.file)
        self._package = HandlerPackage(file.parent)
        made = getattr(self._package.load(file), _CLASS, None)
        if made is None:
            fix = f"define class {_CLASS} with a method execute(self, inputs)"
            raise self._problem(f"No {_CLASS} class found in {file}", fix)
        if not callable(getattr(made, "execute", None)):
            raise self._problem(
                f"{_CLASS} class defined in {file} does not implement execute method.", "define execute(self, inputs)"
            )
        self.model = made()
        found = {name: self._hook(name) for name in ("open", "close")}
        self.hooks = {name: hook for name, hook in found.items() if hook is not None}

    def initialize(self) -> Any:
        """Run ``initialize``, where the object has one; give what is to be awaited, if that is how it is written.

        Raises:
            BaseException: what it raises.
        """
        initialize = self.method("initialize")
        if initialize is None:
            return None
        result = None
        self.is_initializing = True
        try:
            result = initialize(self._arguments())
        finally:
            self.is_initializing = inspect.iscoroutine(result)
        return self._awaited(result) if inspect.iscoroutine(result) else None

    async def _awaited(self, result: Any) -> None:
        try:
            await result
        finally:
            self.is_initializing = False

    def method(self, name: str) -> Callable[..., Any] | None:
        """Give a method of the object, None where it has none."""
        method: Callable[..., Any] | None = getattr(self.model, name, None)
        return method

    def unload(self) -> None:
        """Forget the object and its modules."""
        self.model = None
        if self._package is not None:
            self._package.unload()
            self._package = None

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Give a method that takes one argument by position, the context, whatever it calls that.

        One that takes none or several is the user's own affair.
        """
        method = self.method(name)
        try:
            parameters = [] if method is None else list(inspect.signature(method).parameters.values())
        except (TypeError, ValueError):
            return None
        by_position = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
        wanted = [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
        return method if len(by_position) == 1 and not wanted else None

    def _arguments(self) -> dict[str, Any]:
        outline = self._outline
        return {
            "node_name": outline.node,
            "input_names": list(outline.inputs),
            "output_names": list(outline.outputs),
            "outputs_names": list(outline.outputs),
            "base_path": str(Path(outline.file).parent),
        }

    def _problem(self, message: str, fix: str) -> ConfigError:
        outline = self._outline
        path = f"node {outline.node!r}"
        return ConfigError([Problem(f"{FAILED} - {message}", file=outline.file, path=path, suggestion=fix)])
