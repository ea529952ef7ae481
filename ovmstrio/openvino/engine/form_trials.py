"""Forms of answers on trial: each is compiled once beside the batch before its text may join it.

The library compiles a form in the step in which its text gets its first token, and holds all texts up meanwhile, for
seconds where the form is large; one that it does not take breaks the batch.  So a thread has it compile them before,
one after the other, and the batch finds them compiled.  While it compiles, nobody else may ask for what is compiled.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ovmstrio.core.errors import InvalidField
from ovmstrio.openvino.engine.library_errors import reason_of

if TYPE_CHECKING:
    from ovmstrio.core.generation import GenerationRequest, Grammar
    from ovmstrio.openvino.engine.texts import AskedTexts

__all__ = ["CompilesForms", "FormTrials"]

_REMEMBERED: Final = 512
"""How many forms are known to be taken, those that came last."""
_NICER: Final = 10
_LEAST: Final = 19


class CompilesForms(Protocol):
    """What forms are tried with; see :class:`FormCompiler`."""

    def ask(self, request: GenerationRequest) -> Any:
        """Give what :meth:`compile` is to be told of a request."""
        ...

    def compile(self, config: Any) -> None:
        """Compile a form, in a thread."""
        ...


class _Trial(NamedTuple):
    """What is tried for whom, None for nobody any more."""

    asked: AskedTexts | None
    form: bytes
    done: Future[None] | None


class FormTrials:
    """Requests whose forms are not known yet, in the order in which they have come.

    Args:
        compiler: what they are tried with.

    Attributes:
        descriptor: can be read once a trial has ended, until :meth:`take`.
    """

    def __init__(self, compiler: CompilesForms) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "forms", _yield_to_others)
        self._waiting: deque[AskedTexts] = deque()
        self._trial: _Trial | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def waiting(self) -> int:
        """How many requests wait for a trial, or for its end."""
        return len(self._waiting) + (self._trial is not None and self._trial.asked is not None)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take` has something to give."""
        return self._trial is not None and (self._trial.done is None or self._trial.done.done())

    def wait(self, asked: AskedTexts) -> None:
        """Put a request at the end of those that wait."""
        self._waiting.append(asked)

    def withdraw(self, asked: AskedTexts) -> bool:
        """Forget a request, and tell whether it was here; a trial goes on to its end for nobody."""
        if self._trial is not None and self._trial.asked is asked:
            self._trial = self._trial._replace(asked=None)
            return True
        found = [place for place, each in enumerate(self._waiting) if each is asked]
        for place in found:
            del self._waiting[place]
        return bool(found)

    def go_on(self, *, may_compile: bool) -> None:
        """Begin the next trial, if there is none; of a form that is known it is over at once."""
        if self._trial is not None or not self._waiting:
            return
        asked = self._waiting[0]
        form = _key(asked.request.grammar)
        if form in self._known:
            self._waiting.popleft()
            self._trial = _Trial(asked, form, None)
        elif may_compile:
            self._waiting.popleft()
            self._compile_for(asked, form)

    def _compile_for(self, asked: AskedTexts, form: bytes) -> None:
        self._trial = _Trial(asked, form, self._thread.submit(self._compile, self._compiler.ask(asked.request)))

    def _compile(self, config: Any) -> None:
        try:
            self._compiler.compile(config)
        finally:
            os.eventfd_write(self.descriptor, 1)

    def take(self) -> tuple[AskedTexts, InvalidField | None] | None:
        """Give the request whose trial has ended, and what is wrong with its form; None for nobody."""
        if self._trial is None or not self.has_ended:
            return None
        (asked, form, done), self._trial = self._trial, None
        error = None
        if done is not None:
            os.eventfd_read(self.descriptor)
            error = done.exception()
        if isinstance(error, RuntimeError):
            why = f"the form of the answer cannot be used: {reason_of(error)}"
            return None if asked is None else (asked, InvalidField(why, field="response_format"))
        if error is None:
            self._remember(form)
        if asked is None:
            return None
        asked.is_proven = error is None
        return asked, None

    def _remember(self, form: bytes) -> None:
        self._known[form] = None
        self._known.move_to_end(form)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _yield_to_others() -> None:
    """Let the threads in which the library compiles, eight of them, have together what one has that makes texts."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(_LEAST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def _key(grammar: Grammar | None) -> bytes:
    told = "" if grammar is None else f"{grammar.kind.value}\0{grammar.text}"
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()
