"""The callers that are known now, found by what they show."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.access.allowance import CallerAllowance
from ovmstrio.access.key_file import CallerEntry
from ovmstrio.access.shared_allowance import SharedAllowance
from ovmstrio.core.callers import Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.core.shared_counts import Ledger

__all__ = ["NEVER", "Directory"]

NEVER: Final = float("inf")


class Directory:
    """Callers by the hashes of their keys, the names in their certificates and the subjects of their tokens.

    Secrets are compared by their hashes alone: how long that takes tells nothing of a key that somebody guesses at.

    Args:
        clock: gives the seconds since 1970.
        ledger: where several processes count what callers do; None where this one is the only one.
    """

    def __init__(self, clock: Callable[[], float] = time.time, ledger: Ledger | None = None) -> None:
        self._clock = clock
        self._ledger = ledger
        self._callers: dict[CallerEntry, Caller] = {}
        self._keys: dict[bytes, tuple[Caller, float]] = {}
        self._certificates: dict[str, tuple[Caller, float]] = {}
        self._subjects: dict[str, tuple[Caller, float]] = {}

    def __len__(self) -> int:
        """Count the callers."""
        return len(self._callers)

    def replace(self, entries: Iterable[CallerEntry], keys: Mapping[str, Caller] | None = None) -> None:
        """Know these callers from now on, and no others; those that stay as they are keep what they have used.

        Args:
            entries: of the file.
            keys: further callers by their keys.
        """
        known = self._callers
        self._callers = {entry: known.get(entry) or self._caller(entry) for entry in entries}
        self._keys, self._certificates, self._subjects = {}, {}, {}
        for entry, caller in self._callers.items():
            found = caller, entry.expires_at
            if entry.sha256:
                self._keys[bytes.fromhex(entry.sha256)] = found
            elif entry.certificate:
                self._certificates[entry.certificate] = found
            else:
                self._subjects[entry.subject] = found
        for key, caller in (keys or {}).items():
            self._keys[sha256(key.encode()).digest()] = caller, NEVER

    def by_key(self, digest: bytes) -> tuple[Caller, float] | None:
        """Find the caller of a key by the key's hash, and until when it is one, in seconds since 1970."""
        found = self._keys.get(digest)
        return found if self._valid(found) is not None else None

    def by_subject(self, subject: str) -> Caller | None:
        """Find the caller that a token is about."""
        return self._valid(self._subjects.get(subject))

    def by_certificate(self, certificate: Mapping[str, Any]) -> Caller | None:
        """Find the caller that a verified certificate names, as its common name or an alternative one."""
        for name in _names(certificate):
            found = self._valid(self._certificates.get(name))
            if found is not None:
                return found
        return None

    def _valid(self, found: tuple[Caller, float] | None) -> Caller | None:
        return found[0] if found is not None and self._clock() < found[1] else None

    def _caller(self, entry: CallerEntry) -> Caller:
        limits = entry.requests_per_second, entry.concurrency, entry.tokens_per_minute
        allowance: CallerAllowance | None = None
        if any(limits):
            shared = None if self._ledger is None else SharedAllowance(self._ledger, entry)
            allowance = shared or CallerAllowance(entry.name, *limits)
        return Caller(entry.name, entry.proof, entry.scopes, allowance)


def _names(certificate: Mapping[str, Any]) -> Iterable[str]:
    for part in certificate.get("subject", ()):
        yield from (value for key, value in part if key == "commonName")
    yield from (value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str))
