"""From what a request shows to the caller that it is of.

::

    authorization: Bearer ...  ─┐            ┌─ a key, by its hash
    x-api-key: ...             ─┼─> digest ──┼─ a token that was seen, until it expires
    the client's certificate   ─┘            └─ a token, verified ─> by its subject, or with the scopes that it has
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.access.directory import Directory

__all__ = ["Authentication", "TokenVerifier", "VerifiedClaims", "bearer_of"]

_BEARER: Final = "bearer "
_MOST_TOKENS: Final = 10_000
"""How many tokens are remembered."""
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
            if value[: len(_BEARER)].lower() == _BEARER:
                return value[len(_BEARER) :].strip()
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
        self._tokens: dict[bytes, tuple[Caller, float]] = {}

    def forget_tokens(self) -> None:
        """Verify every token again, as who they are about, or what they are verified with, has changed."""
        self._tokens.clear()

    async def identify(self, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Caller:
        """Find the caller of a request.

        Args:
            headers: in small letters.
            certificate: of the client, verified; what the headers show is heard first.

        Raises:
            Unauthenticated: it shows nothing, or what is not known, or not any more.

        Cancellation: while a token's keys are fetched.  No checkpoint for what was seen before.
        """
        secret = bearer_of(headers)
        if not secret:
            caller = None if certificate is None else self._directory.by_certificate(certificate)
            if caller is None:
                raise Unauthenticated(_NOTHING_SHOWN)
            return caller
        digest = sha256(secret.encode("latin-1", "replace")).digest()
        caller = self._directory.by_key(digest)
        if caller is not None:
            return caller
        known = self._tokens.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        return await self._verified(secret, digest)

    async def _verified(self, token: str, digest: bytes) -> Caller:
        self._tokens.pop(digest, None)
        is_token = token.count(".") == _DOTS_OF_A_TOKEN and len(token) <= _MOST_CHARACTERS
        if self._verifier is None or not is_token:
            raise Unauthenticated("the key is not known, or not any more", is_wrong=True)
        claims = await self._verifier.verify(token)
        caller = self._directory.by_subject(claims.subject)
        if caller is None:
            caller = Caller(claims.subject, "token", claims.scopes)
        if len(self._tokens) >= _MOST_TOKENS:
            self._tokens.clear()
        self._tokens[digest] = caller, claims.expires_at
        return caller
