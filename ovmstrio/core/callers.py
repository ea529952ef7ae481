"""Who calls, and what that allows: values that doors, data plane and services share, free of how a caller is known.

::

    headers, certificate ─> authentication ─> Caller ─(demand: a scope; enter: its limits)─> the call
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase, translate
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from ovmstrio.core.errors import MissingScope, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "NO_SCOPE",
    "OVER_LIMIT",
    "Allowance",
    "Caller",
    "Need",
    "Scopes",
    "allowance_of_caller",
    "current_caller",
    "current_certificate",
    "demand_of_caller",
    "leave_caller",
]

_KNOWN: Final = 1024
"""How many names of services a caller's verdicts are remembered for."""
_INFER: Final = "infer:"
_WILD: Final = frozenset("*?[")
_HARD: Final = frozenset("?[")

NO_SCOPE: Final = "scope"
"""What metrics call the refusal of a caller that is known and may not do what it asks for."""

OVER_LIMIT: Final = "limit"
"""What they call that of one that has asked for as much as it may."""


class Need(Enum):
    """What a request needs its caller to have."""

    NOTHING = auto()
    """Health: whoever asks."""
    CALLER = auto()
    """Any caller that is known."""
    ABOUT = auto()
    """A question about one service: ``read``, or that the caller may call it."""
    READ = auto()
    INFER = auto()
    GENERATE = auto()
    """An inference at an endpoint of generation, which an API key alone guards, too."""
    METRICS = auto()
    ADMIN = auto()


@dataclass(frozen=True, slots=True)
class Scopes:
    """What a caller may do.

    Attributes:
        infer: patterns of names of services; ``*`` stands for anything, ``?`` for one character, ``[ab]`` for one of
            some.
        read: whether it may ask about everything.
        metrics: whether it may scrape.
        admin: whether it may change the server, and ask about everything.
    """

    infer: tuple[str, ...] = ()
    read: bool = False
    metrics: bool = False
    admin: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Read scopes as they are written: ``infer:resnet*``, ``read``, ``metrics``, ``admin``.

        Raises:
            ValueError: one of them is none of these; it says which.
        """
        patterns, flags = [], set()
        for text in texts:
            if text.startswith(_INFER) and len(text) > len(_INFER):
                patterns.append(text.removeprefix(_INFER))
            elif text in {"read", "metrics", "admin"}:
                flags.add(text)
            else:
                raise ValueError(f"expected read, metrics, admin or infer:PATTERN, got {text[:80]!r}")
        return cls(tuple(patterns), "read" in flags, "metrics" in flags, "admin" in flags)

    @classmethod
    def known_of(cls, texts: Iterable[str]) -> Self:
        """Take the scopes that this server knows from texts among which are those of others."""
        known = []
        for text in texts:
            try:
                cls.parse([text])
            except ValueError:
                continue
            known.append(text)
        return cls.parse(known)

    def lacks(self, others: Scopes) -> str:
        """Tell a scope that others have, and these do not; empty where there is none."""
        own = {*self.texts(), *(("read",) if self.admin else ())}
        lost = (text for text in others.texts() if text not in own and not self._covers(text))
        return next(lost, "")

    def _covers(self, scope: str) -> bool:
        """Tell whether a pattern is wider than that of a scope; where that is hard to tell, it is not."""
        asked = scope.removeprefix(_INFER)
        if asked == scope:
            return False
        # A star takes in any pattern but for one of brackets, whose text is not of the names that it matches.
        wider = self.infer if _WILD.isdisjoint(asked) else [each for each in self.infer if _HARD.isdisjoint(each)]
        return "*" in self.infer or ("[" not in asked and any(fnmatchcase(asked, each) for each in wider))

    def texts(self) -> tuple[str, ...]:
        """Write the scopes as :meth:`parse` reads them."""
        flags = [name for name in ("read", "metrics", "admin") if getattr(self, name)]
        return (*(f"{_INFER}{pattern}" for pattern in self.infer), *flags)


EVERYTHING: Final = Scopes(("*",), read=True, metrics=True, admin=True)


class Allowance(Protocol):
    """How much a caller may ask for."""

    def take(self) -> None:
        """Count one more request.

        Raises:
            CallerLimited: it is one too many.
        """
        ...

    def give_back(self) -> None:
        """Count one less under way."""
        ...

    def check_tokens(self) -> None:
        """Let a request that reads or makes tokens of text pass.

        Raises:
            CallerLimited: those before it have used up what there is.
        """
        ...

    def spend_tokens(self, number: int) -> None:
        """Count tokens that were read or made."""
        ...


@dataclass(frozen=True, eq=False)
class Caller:
    """Somebody who is known; all requests of one caller share one.

    Attributes:
        name: in logs and events; never a secret.
        proof: by what it is known: ``key``, ``token`` or ``certificate``.
        scopes: what it may do.
        allowance: how much, None for as much as there is.
    """

    name: str
    proof: str
    scopes: Scopes
    allowance: Allowance | None = None
    _pattern: re.Pattern[str] | None = field(init=False, repr=False)
    _verdicts: dict[str, bool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        patterns = [translate(pattern) for pattern in self.scopes.infer]
        object.__setattr__(self, "_pattern", re.compile("|".join(patterns)) if patterns else None)

    def may_infer(self, service: str) -> bool:
        """Tell whether the caller may call a service; with an empty name, whether there is any that it may call."""
        known = self._verdicts.get(service)
        if known is None:
            if len(self._verdicts) >= _KNOWN:
                self._verdicts.clear()
            pattern = self._pattern
            known = pattern is not None and (not service or pattern.match(service) is not None)
            self._verdicts[service] = known
        return known

    def demand(self, need: Need, service: str = "") -> None:
        """Let pass what the caller may do.

        Args:
            need: of the request.
            service: which one it is about; empty where that is not known yet.

        Raises:
            MissingScope: it may not; the message says which scope is missing.
        """
        if need is Need.INFER or need is Need.GENERATE:
            if self.may_infer(service):
                return
        elif _is_met(need, self.scopes) or (need is Need.ABOUT and self.may_infer(service)):
            return
        raise MissingScope(self.name, _scope_of(need, service))

    def demand_all_of(self, before: Caller) -> None:
        """Let pass one that may do all that it could before.

        Raises:
            MissingScope: it may do less; the message says which scope is missing.
        """
        lost = self.scopes.lacks(before.scopes)
        if lost:
            raise MissingScope(self.name, lost)

    def enter(self) -> None:
        """Count a request of the caller's; :meth:`leave` must follow.

        Raises:
            CallerLimited: it is one too many, and is not counted.
        """
        if self.allowance is not None:
            self.allowance.take()

    def leave(self) -> None:
        """End a request of the caller's."""
        if self.allowance is not None:
            self.allowance.give_back()


def _is_met(need: Need, scopes: Scopes) -> bool:
    match need:
        case Need.NOTHING | Need.CALLER:
            return True
        case Need.READ | Need.ABOUT:
            return scopes.read or scopes.admin
        case Need.METRICS:
            return scopes.metrics
        case _:
            return need is Need.ADMIN and scopes.admin


def _scope_of(need: Need, service: str) -> str:
    if need in {Need.INFER, Need.GENERATE}:
        return f"{_INFER}{service or '*'}"
    return "read" if need is Need.ABOUT else need.name.lower()


current_caller: Final[ContextVar[Caller | None]] = ContextVar("current_caller", default=None)
"""Who asks for what the running task does; None where nobody had to say."""

current_certificate: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar("current_certificate", default=None)
"""The verified certificate of the client at the other end of the running task's connection."""


def demand_of_caller(need: Need, service: str = "") -> None:
    """Let pass what the current caller may do, where everybody has to be known.

    Raises:
        Unauthenticated: nobody was asked who it is.
        MissingScope: it may not.
    """
    caller = current_caller.get()
    if caller is None:
        raise Unauthenticated("who calls is not known")
    caller.demand(need, service)


def allowance_of_caller() -> Allowance | None:
    """Give how much the current caller may ask for; None for as much as there is."""
    caller = current_caller.get()
    return None if caller is None else caller.allowance


def leave_caller() -> None:
    """End the request of the running task's caller, if it has one."""
    caller = current_caller.get()
    if caller is not None:
        current_caller.set(None)
        caller.leave()
