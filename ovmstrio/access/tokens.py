"""JSON Web Tokens: signed by keys that are known, for this server, now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from ovmstrio.access.authentication import VerifiedClaims
from ovmstrio.core.callers import Scopes
from ovmstrio.core.errors import ConfigError, Problem, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FileKeys", "SigningKeys", "TokenRules", "Tokens", "read_key_set"]

_ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
)
"""Only such as have public keys: with one that signs and verifies by one secret, whoever verifies could sign."""
_SYMMETRIC: Final = "oct"
_LONGEST_SUBJECT: Final = 256
"""Characters of ``sub``, which is the caller's name in logs and events."""
_LONGEST_SECONDS: Final = 300.0
"""How long a token is taken for valid without another look at it."""


class SigningKeys(Protocol):
    """The public keys of who signs tokens."""

    async def current(self) -> KeySet:
        """Give the keys that are known.

        Raises:
            Unauthenticated: there are none yet, and they cannot be had.

        Cancellation: while they are fetched.
        """
        ...

    async def renewed(self) -> bool:
        """Look for keys that are newer than those known; False if there are none.

        Cancellation: as :meth:`current`.
        """
        ...


class FileKeys:
    """Keys of a file, which whoever watches it puts in place."""

    def __init__(self, keys: KeySet) -> None:
        self.keys = keys

    async def current(self) -> KeySet:
        """Give the keys.  Not a checkpoint."""
        return self.keys

    async def renewed(self) -> bool:
        """Leave it to the watcher.  Not a checkpoint."""
        return False


def read_key_set(document: Any, origin: str) -> KeySet:
    """Read a JSON Web Key Set.

    Raises:
        ConfigError: it is none, or has a key that is not a public one.
    """
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise ConfigError([Problem("no JSON Web Key Set", origin, expected='{"keys": [...]}')])
    if any(key.get("kty") == _SYMMETRIC for key in keys):
        raise ConfigError([Problem("a key set with a secret key", origin, expected="public keys alone")])
    try:
        return KeySet.import_key_set({"keys": keys})
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise ConfigError([Problem(f"a key cannot be used: {error}", origin)]) from None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What tokens must say.

    Attributes:
        issuer: ``iss``; empty for any.
        audience: among their ``aud``; empty for any.
        leeway_seconds: by which clocks may differ.
    """

    issuer: str = ""
    audience: str = ""
    leeway_seconds: int = 60


class Tokens:
    """Verifies tokens.

    Args:
        keys: of who signs them.
        rules: what they must say.
        clock: gives the seconds since 1970.
    """

    def __init__(self, keys: SigningKeys, rules: TokenRules, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._rules = rules
        self._clock = clock
        asked: dict[str, Any] = {"sub": {"essential": True}, "exp": {"essential": True}}
        if rules.issuer:
            asked["iss"] = {"essential": True, "value": rules.issuer}
        if rules.audience:
            asked["aud"] = {"essential": True, "value": rules.audience}
        self._registry = jwt.JWTClaimsRegistry(now=lambda: int(clock()), leeway=rules.leeway_seconds, **asked)

    async def verify(self, token: str) -> VerifiedClaims:
        """Verify a token.

        Raises:
            Unauthenticated: it is not valid; the message says why, and nothing of what is in it.

        Cancellation: while keys are fetched.
        """
        try:
            claims = await self._claims(token)
            self._registry.validate(claims)
            until = float(claims["exp"]) + self._rules.leeway_seconds
        except (JoseError, ValueError, TypeError, OverflowError, RecursionError) as error:
            reason = getattr(error, "description", "") or getattr(error, "error", "") or type(error).__name__
            raise Unauthenticated(f"the token is not valid: {reason}", is_wrong=True) from None
        if len(claims["sub"]) > _LONGEST_SUBJECT or not claims["sub"].isprintable():
            raise Unauthenticated("the token is not valid: its subject is no name that a log can have", is_wrong=True)
        return VerifiedClaims(claims["sub"], _scopes(claims), min(until, self._clock() + _LONGEST_SECONDS))

    async def _claims(self, token: str) -> dict[str, Any]:
        keys = await self._keys.current()
        try:
            return jwt.decode(token, keys, algorithms=_ALGORITHMS).claims
        except InvalidKeyIdError:
            # Its signer may have a new key.
            if not await self._keys.renewed():
                raise
        return jwt.decode(token, await self._keys.current(), algorithms=_ALGORITHMS).claims


def _scopes(claims: Mapping[str, Any]) -> Scopes:
    said = claims.get("scope", claims.get("scp", ""))
    texts = said.split() if isinstance(said, str) else said
    return Scopes.known_of(text for text in texts if isinstance(text, str)) if isinstance(texts, list) else Scopes()
