"""Callers, scopes and allowances: authorisation values shared by front ends, data plane and services.

::

    headers, certificate ─> authentication ─> Caller ─(demand: a scope; enter: its limits)─> the call
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase, translate
from typing import TYPE_CHECKING, Final, Protocol, Self

from ovmstrio.core.errors import MissingScope, Unauthenticated
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_VERDICTS: Final = 1024
"""Size limit of a caller's cache of service decisions."""
_INFER: Final = "infer:"
_WILDCARDS: Final = frozenset("*?[")
_BRACKETS: Final = frozenset("?[")

MISSING_SCOPE_REASON: Final = "scope"
"""Metric label for missing scopes."""

OVER_LIMIT_REASON: Final = "limit"
"""Metric label for exceeded quotas."""


class Permission(Enum):
    """Permission that a request needs."""

    NOTHING = auto()
    """Health checks."""
    CALLER = auto()
    """Any authenticated caller."""
    ABOUT = auto()
    """Query of one service: scope ``read`` or permission to call the service."""
    READ = auto()
    INFER = auto()
    GENERATE = auto()
    """Inference at a generation endpoint, which an API key alone also guards."""
    METRICS = auto()
    ADMIN = auto()


@dataclass(frozen=True, slots=True)
class Scopes:
    """Permissions of a caller.

    Attributes:
        infer: patterns of service names with ``*``, ``?`` and ``[ab]``.
        read: permission to query everything.
        metrics: permission to scrape metrics.
        admin: permission to change the server and to query everything.
    """

    infer: tuple[str, ...] = ()
    read: bool = False
    metrics: bool = False
    admin: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Parse scopes: ``infer:resnet*``, ``read``, ``metrics``, ``admin``; raises ValueError if one is unknown."""
        patterns, flags = [], set()
        for text in texts:
            if text.startswith(_INFER) and len(text) > len(_INFER):
                patterns.append(text.removeprefix(_INFER))
            elif text in {"read", "metrics", "admin"}:
                flags.add(text)
            else:
                raise ValueError(f"expected read, metrics, admin or infer:PATTERN, got {shown(text, 80)}")
        return cls(tuple(patterns), "read" in flags, "metrics" in flags, "admin" in flags)

    @classmethod
    def parse_known(cls, texts: Iterable[str]) -> Self:
        """Parse scopes and ignore unknown ones."""
        known = []
        for text in texts:
            try:
                cls.parse([text])
            except ValueError:
                continue
            known.append(text)
        return cls.parse(known)

    def lacks(self, others: Scopes) -> str:
        """Return a scope of ``others`` that these scopes lack, or an empty string."""
        own = {*self.texts(), *(("read",) if self.admin else ())}
        lost = (text for text in others.texts() if text not in own and not self._covers(text))
        return next(lost, "")

    def _covers(self, scope: str) -> bool:
        """Return whether a pattern covers that of a scope; False if undecided."""
        requested = scope.removeprefix(_INFER)
        if requested == scope:
            return False
        # ``*`` covers every pattern except brackets, as names that match brackets do not look like the pattern.
        wider = (
            self.infer
            if _WILDCARDS.isdisjoint(requested)
            else [each for each in self.infer if _BRACKETS.isdisjoint(each)]
        )
        return "*" in self.infer or ("[" not in requested and any(fnmatchcase(requested, each) for each in wider))

    def texts(self) -> tuple[str, ...]:
        """Return the scopes as :meth:`parse` reads them."""
        flags = [name for name in ("read", "metrics", "admin") if getattr(self, name)]
        return (*(f"{_INFER}{pattern}" for pattern in self.infer), *flags)


ALL_SCOPES: Final = Scopes(("*",), read=True, metrics=True, admin=True)


class Quota(Protocol):
    """Quota of a caller."""

    def acquire(self) -> None:
        """Count a new request; raises CallerLimited if the quota is exceeded."""

    def release(self) -> None:
        """Count a finished request."""

    def check_tokens(self) -> None:
        """Check the token quota of a text request; raises CallerLimited if earlier requests have used up the quota."""

    def spend_tokens(self, number: int) -> None:
        """Count prompt or completion tokens."""


@dataclass(frozen=True, eq=False)
class Caller:
    """An authenticated caller; all requests of a caller share one instance.

    Attributes:
        name: for logs and events; never a secret.
        proof: ``key``, ``token`` or ``certificate``.
        allowance: quota; None for unlimited.
    """

    name: str
    proof: str
    scopes: Scopes
    allowance: Quota | None = None
    _pattern: re.Pattern[str] | None = field(init=False, repr=False)
    _verdicts: dict[str, bool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        patterns = [translate(pattern) for pattern in self.scopes.infer]
        object.__setattr__(self, "_pattern", re.compile("|".join(patterns)) if patterns else None)

    def may_infer(self, service: str) -> bool:
        """Return whether the caller may call a service; with an empty name, any service at all."""
        known = self._verdicts.get(service)
        if known is None:
            if len(self._verdicts) >= _MAX_VERDICTS:
                self._verdicts.clear()
            pattern = self._pattern
            known = pattern is not None and (not service or pattern.match(service) is not None)
            self._verdicts[service] = known
        return known

    def check(self, need: Permission, service: str = "") -> None:
        """Check a permission.

        Args:
            need: required permission.
            service: name of the service; empty if not known yet.

        Raises:
            MissingScope: the permission is missing.
        """
        if need is Permission.INFER or need is Permission.GENERATE:
            if self.may_infer(service):
                return
        elif _is_met(need, self.scopes) or (need is Permission.ABOUT and self.may_infer(service)):
            return
        raise MissingScope(self.name, _scope_of(need, service))

    def check_same_scopes(self, before: Caller) -> None:
        """Check that all scopes of ``before`` are still granted; raises MissingScope if a scope was removed."""
        lost = self.scopes.lacks(before.scopes)
        if lost:
            raise MissingScope(self.name, lost)

    def enter(self) -> None:
        """Count a request; :meth:`leave` must follow.

        Raises:
            CallerLimited: the quota is exceeded; the request is not counted.
        """
        if self.allowance is not None:
            self.allowance.acquire()

    def leave(self) -> None:
        """Count a finished request."""
        if self.allowance is not None:
            self.allowance.release()


def _is_met(need: Permission, scopes: Scopes) -> bool:
    match need:
        case Permission.NOTHING | Permission.CALLER:
            return True
        case Permission.READ | Permission.ABOUT:
            return scopes.read or scopes.admin
        case Permission.METRICS:
            return scopes.metrics
        case _:
            return need is Permission.ADMIN and scopes.admin


def _scope_of(need: Permission, service: str) -> str:
    if need in {Permission.INFER, Permission.GENERATE}:
        return f"{_INFER}{service or '*'}"
    return "read" if need is Permission.ABOUT else need.name.lower()


current_caller: Final[ContextVar[Caller | None]] = ContextVar("current_caller", default=None)
"""Caller of the running task; None without authentication."""


def check_current_caller(need: Permission, service: str = "") -> None:
    """Check a permission of the running task's caller.

    Raises:
        Unauthenticated: there is no caller.
        MissingScope: the permission is missing.
    """
    caller = current_caller.get()
    if caller is None:
        raise Unauthenticated("caller unknown")
    caller.check(need, service)


def current_quota() -> Quota | None:
    """Return the quota of the running task's caller; None for unlimited."""
    caller = current_caller.get()
    return None if caller is None else caller.allowance


def release_caller() -> None:
    """End the request of the running task's caller, if there is one."""
    caller = current_caller.get()
    if caller is not None:
        current_caller.set(None)
        caller.leave()
