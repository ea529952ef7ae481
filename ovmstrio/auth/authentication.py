"""From what a request shows to the caller that it is of.

::

    authorization: Bearer ...  ─┐            ┌─ a key, by its hash
    x-api-key: ...             ─┼─> digest ──┼─ a token that was seen, until it expires
    the client's certificate   ─┘            └─ a token, verified ─> by its subject, or with the scopes that it has
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import blake2b, sha256
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ovmstrio.auth.key_file import CallerEntry
from ovmstrio.auth.quota import CallerAllowance, SharedAllowance
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.core.worker_peers import Ledger

__all__ = ["NEVER", "Authentication", "Directory", "Known", "TokenVerifier", "VerifiedClaims", "bearer_of"]

# ----------------------------------------------------------------------
# The callers that are known now, found by what they show
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# From what a request shows to the caller that it is of
# ----------------------------------------------------------------------

_BEARER: Final = "bearer"
_MOST_SEEN: Final = 10_000
"""How many keys and tokens are remembered."""
_MOST_CHARACTERS: Final = 16_384
_DOTS_OF_A_TOKEN: Final = 2

_NOTHING_SHOWN: Final = "who calls must be known: send a key or a token as 'authorization: Bearer ...', or 'x-api-key'"


@dataclass(frozen=True, slots=True)
class VerifiedClaims:
    """What a verified token says.

    Attributes:
        subject: ``sub``.
        scopes: those of ``scope`` (separated by blanks) or ``scp`` that the server knows.
        expires_at: when it has to be looked at again, in seconds since 1970.
    """

    subject: str
    scopes: Scopes
    expires_at: float


class Known(NamedTuple):
    """Who makes a request, and for how long that need not be asked again.

    Attributes:
        caller: who it is.
        until: in seconds since 1970; 0 where it has to be asked every time.
        among: what stands for all callers that there were when it was asked.
    """

    caller: Caller
    until: float
    among: object


class TokenVerifier(Protocol):
    """Verifies tokens."""

    async def verify(self, token: str) -> VerifiedClaims:
        """Verify a token.

        Raises:
            Unauthenticated: it is not valid; the message says why.

        Cancellation: while keys are fetched.
        """
        ...


def bearer_of(headers: Iterable[tuple[str, str]]) -> str:
    """Find the key or token that a request shows; empty if it shows none."""
    shown = ""
    for name, value in headers:
        if name == "authorization":
            kind, _, rest = value.partition(" ")
            if kind == "Bearer" or kind.lower() == _BEARER:
                return rest.strip()
        elif name == "x-api-key":
            shown = value
    return shown


class Authentication:
    """Tells who calls.

    Args:
        directory: the callers that are known.
        verifier: of tokens; None where there are none.
        clock: gives the seconds since 1970.
    """

    def __init__(
        self, directory: Directory, verifier: TokenVerifier | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._verifier = verifier
        self._clock = clock
        self._seen: dict[bytes, tuple[Caller, float]] = {}
        self._secret = token_bytes()

    def forget_seen(self) -> None:
        """Look again at what every request shows, as callers, or what tokens are verified with, have changed."""
        self._seen = {}

    def seen(self, headers: Iterable[tuple[str, str]], notes: dict[object, Any] | None = None) -> Caller | None:
        """Find the caller of a request that shows what was seen before, and is still valid; None for any other.

        Args:
            headers: in small letters.
            notes: where those of these very headers are, if they may come again: the caller is noted, and found there.
        """
        seen = self._seen
        # What was noted counts until callers change, for then there is another dictionary.
        noted = None if notes is None else notes.get(self)
        if noted is not None and noted[0] is seen and (noted[2] == NEVER or self._clock() < noted[2]):
            caller: Caller = noted[1]
            return caller
        shown = bearer_of(headers)
        known = seen.get(self._mark(shown)) if shown else None
        if known is None or not (known[1] == NEVER or self._clock() < known[1]):
            return None
        if notes is not None:
            notes[self] = (seen, *known)
        return known[0]

    def holds(self, known: object) -> bool:
        """Tell whether what :meth:`known` has given is still so."""
        return isinstance(known, Known) and known.among is self._seen and self._clock() < known.until

    async def known(self, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Known:
        """Find the caller of a request as :meth:`identify` does, and until when it is that.

        Raises:
            Unauthenticated: as there.

        Cancellation: as there.
        """
        headers, among = tuple(headers), self._seen
        caller = await self.identify(headers, certificate)
        shown = bearer_of(headers)
        found = self._seen.get(self._mark(shown)) if shown else None
        return Known(caller, 0.0 if found is None else found[1], among)

    def _mark(self, shown: str) -> bytes:
        """Give what a key or token is remembered by, of which nobody can find another with a part in common."""
        return blake2b(shown.encode("latin-1", "replace"), key=self._secret, digest_size=16).digest()

    async def identify(self, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Caller:
        """Find the caller of a request.

        Args:
            headers: in small letters.
            certificate: of the client, verified; what the headers show is heard first.

        Raises:
            Unauthenticated: it shows nothing, or what is not known, or not any more.

        Cancellation: while a token's keys are fetched.  No checkpoint for what was seen before.
        """
        shown = bearer_of(headers)
        if not shown:
            caller = None if certificate is None else self._directory.by_certificate(certificate)
            if caller is None:
                raise Unauthenticated(_NOTHING_SHOWN)
            return caller
        known = self.seen(headers)
        if known is not None:
            return known
        seen = self._seen
        found = self._directory.by_key(sha256(_bytes_of(shown)).digest()) or await self._verified(shown)
        if len(seen) >= _MOST_SEEN:
            seen.clear()
        # Where callers have changed meanwhile, this is not the one that is asked next time.
        seen[self._mark(shown)] = found
        return found[0]

    async def _verified(self, token: str) -> tuple[Caller, float]:
        is_token = token.count(".") == _DOTS_OF_A_TOKEN and len(token) <= _MOST_CHARACTERS
        if self._verifier is None or not is_token:
            raise Unauthenticated("the key is not known, or not any more", is_wrong=True)
        claims = await self._verifier.verify(token)
        caller = self._directory.by_subject(claims.subject)
        return caller or Caller(claims.subject, "token", claims.scopes), claims.expires_at


def _bytes_of(shown: str) -> bytes:
    return shown.encode("latin-1", "replace")
