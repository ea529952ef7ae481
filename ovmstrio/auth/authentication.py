"""Authentication: identification of callers by API key, token or client certificate.

::

    authorization: Bearer ...  ─┐            ┌─ API key, by its hash
    x-api-key: ...             ─┼─> digest ──┼─ cached token, until it expires
    client certificate         ─┘            └─ verified token ─> by its subject, or with its scopes
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b, sha256
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.auth.key_file import CallerEntry
from ovmstrio.auth.quota import CallerQuota, SharedQuota
from ovmstrio.core.callers import Caller, Scopes, current_caller
from ovmstrio.core.errors import Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.core.http_messages import Headers
    from ovmstrio.core.worker_peers import Counters

# Caller directory

NEVER: Final = float("inf")


class CallerDirectory:
    """Callers by key hash, certificate name and token subject.

    Secrets are compared by hash only, so that timing reveals nothing.

    Args:
        counters: counters shared by all workers, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.time, counters: Counters | None = None) -> None:
        self._clock = clock
        self._shared_counters = counters
        self._callers: dict[CallerEntry, Caller] = {}
        self._keys: dict[bytes, tuple[Caller, float]] = {}
        self._certificates: dict[str, tuple[Caller, float]] = {}
        self._subjects: dict[str, tuple[Caller, float]] = {}

    def __len__(self) -> int:
        """Return the number of callers."""
        return len(self._callers)

    def replace(self, entries: Iterable[CallerEntry], keys: Mapping[str, Caller] | None = None) -> None:
        """Replace all callers; unchanged ones keep their used quota."""
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
        """Return the caller of a key hash and the expiry in seconds since the epoch."""
        found = self._keys.get(digest)
        return found if self._valid(found) is not None else None

    def by_subject(self, subject: str) -> Caller | None:
        """Return the caller of a token subject."""
        return self._valid(self._subjects.get(subject))

    def by_certificate(self, certificate: Mapping[str, Any]) -> Caller | None:
        """Return the caller of a verified certificate, by common name or alternative name."""
        for name in _names(certificate):
            found = self._valid(self._certificates.get(name))
            if found is not None:
                return found
        return None

    def _valid(self, found: tuple[Caller, float] | None) -> Caller | None:
        return found[0] if found is not None and self._clock() < found[1] else None

    def _caller(self, entry: CallerEntry) -> Caller:
        limits = entry.requests_per_second, entry.concurrency, entry.tokens_per_minute
        allowance: CallerQuota | None = None
        if any(limits):
            shared = None if self._shared_counters is None else SharedQuota(self._shared_counters, entry)
            allowance = shared or CallerQuota(entry.name, *limits)
        return Caller(entry.name, entry.proof, entry.scopes, allowance)


def _names(certificate: Mapping[str, Any]) -> Iterable[str]:
    for part in certificate.get("subject", ()):
        yield from (value for key, value in part if key == "commonName")
    yield from (value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str))


# Authentication

_BEARER: Final = "bearer"
_MAX_CACHED: Final = 10_000
"""Size limit of the cache of keys and tokens."""
_MAX_TOKEN_CHARACTERS: Final = 16_384
_TOKEN_DOTS: Final = 2

_NO_CREDENTIALS: Final = "authentication required: send a key or token as 'authorization: Bearer ...' or 'x-api-key'"


@dataclass(frozen=True, slots=True)
class VerifiedClaims:
    """Claims of a verified token.

    Attributes:
        subject: ``sub``.
        scopes: known scopes of ``scope`` (separated by spaces) or ``scp``.
        expires_at: time of the next verification, seconds since the epoch.
    """

    subject: str
    scopes: Scopes
    expires_at: float


class IdentifiedCaller(NamedTuple):
    """An identified caller and the validity of that identification.

    Attributes:
        until: seconds since the epoch; 0 if it must be checked every time.
        among: cache object at the time; replaced when callers change.
    """

    caller: Caller
    until: float
    among: object


VerifyToken = Callable[[str], Awaitable[VerifiedClaims]]
"""Verifies a token; raises ``Unauthenticated`` with the reason if the token is invalid."""


def request_credential(headers: Iterable[tuple[str, str]]) -> str:
    """Return the key or token of a request, or an empty string."""
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
    """Identifies callers."""

    def __init__(
        self, directory: CallerDirectory, verify: VerifyToken | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._verify = verify
        self._clock = clock
        self._seen: dict[bytes, tuple[Caller, float]] = {}
        self._secret = token_bytes()

    def clear_cache(self) -> None:
        """Clear the cache, as callers or signing keys have changed."""
        self._seen = {}

    def seen(self, headers: Iterable[tuple[str, str]], cache: dict[object, Any] | None = None) -> Caller | None:
        """Return the cached caller of a request, or None.

        Args:
            headers: lower-case names and values.
            cache: cache of these very headers, if they may be repeated.
        """
        seen = self._seen
        # Notes are valid until callers change, as the cache is then another dictionary.
        note = None if cache is None else cache.get(self)
        if note is not None and note[0] is seen and (note[2] == NEVER or self._clock() < note[2]):
            caller: Caller = note[1]
            return caller
        shown = request_credential(headers)
        known = seen.get(self._digest(shown)) if shown else None
        if known is None or not (known[1] == NEVER or self._clock() < known[1]):
            return None
        if cache is not None:
            cache[self] = (seen, *known)
        return known[0]

    def holds(self, known: object) -> bool:
        """Return whether the result of :meth:`known` is still valid."""
        return isinstance(known, IdentifiedCaller) and known.among is self._seen and self._clock() < known.until

    async def known(
        self, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> IdentifiedCaller:
        """Return the caller of a request as :meth:`identify`, with its validity.

        Raises:
            Unauthenticated: as :meth:`identify`.
        """
        headers, among = tuple(headers), self._seen
        caller = await self.identify(headers, certificate)
        shown = request_credential(headers)
        found = self._seen.get(self._digest(shown)) if shown else None
        return IdentifiedCaller(caller, 0.0 if found is None else found[1], among)

    def _digest(self, shown: str) -> bytes:
        """Return the keyed hash of a secret, so that no one can construct collisions."""
        return blake2b(shown.encode("latin-1", "replace"), key=self._secret, digest_size=16).digest()

    async def identify(self, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Caller:
        """Return the caller of a request.

        Args:
            headers: lower-case names and values; have precedence over the certificate.
            certificate: verified client certificate.

        Raises:
            Unauthenticated: missing, unknown or expired credentials.

        Cancellation: no checkpoint for cached credentials.
        """
        shown = request_credential(headers)
        if not shown:
            caller = None if certificate is None else self._directory.by_certificate(certificate)
            if caller is None:
                raise Unauthenticated(_NO_CREDENTIALS)
            return caller
        known = self.seen(headers)
        if known is not None:
            return known
        seen = self._seen
        found = self._directory.by_key(sha256(_encode(shown)).digest()) or await self._verified(shown)
        if len(seen) >= _MAX_CACHED:
            seen.clear()
        # If callers have changed meanwhile, this is the old cache and the entry has no effect.
        seen[self._digest(shown)] = found
        return found[0]

    async def _verified(self, token: str) -> tuple[Caller, float]:
        is_token = token.count(".") == _TOKEN_DOTS and len(token) <= _MAX_TOKEN_CHARACTERS
        if self._verify is None or not is_token:
            raise Unauthenticated("unknown or expired key", is_wrong=True)
        claims = await self._verify(token)
        caller = self._directory.by_subject(claims.subject)
        return caller or Caller(claims.subject, "token", claims.scopes), claims.expires_at


def _encode(shown: str) -> bytes:
    return shown.encode("latin-1", "replace")


# Removal of credentials before user code sees the headers

_CERTIFICATE: Final = "certificate"
_CREDENTIAL_HEADERS: Final = frozenset({"authorization", "x-api-key"})


def strip_credentials(headers: Headers) -> Headers:
    """Return the headers without the credentials that authenticated the running task's caller.

    Other credentials, which are meant for the service itself, are kept.
    """
    caller = current_caller.get()
    if caller is None or caller.proof == _CERTIFICATE:
        return headers
    shown = request_credential(headers)
    return tuple(line for line in headers if line[0] not in _CREDENTIAL_HEADERS or request_credential((line,)) != shown)
