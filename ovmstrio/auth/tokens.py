"""JSON Web Tokens: signed by keys that are known, for this server, now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import httpx
import orjson
import structlog
import trio
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from ovmstrio.auth.authentication import VerifiedClaims
from ovmstrio.core.callers import Scopes
from ovmstrio.core.errors import ConfigError, Problem, Unauthenticated
from ovmstrio.core.tracing import part_of_server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FileKeys", "IssuerKeys", "SigningKeys", "TokenRules", "Tokens", "read_key_set"]

# ----------------------------------------------------------------------
# JSON Web Tokens: signed by keys that are known, for this server, now
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# The keys of an OpenID Connect issuer, fetched when a token needs them and again when they may have changed
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_DISCOVERY: Final = "/.well-known/openid-configuration"
_FETCH_SECONDS: Final = 10.0
_MOST_BYTES: Final = 2**20
_RENEWAL_SECONDS: Final = 30.0
"""How often strangers' tokens can have the issuer asked."""
_KEPT_SECONDS: Final = 3600.0
"""How long keys are used before they are fetched again, so that one that the issuer withdraws ends."""


class IssuerKeys:
    """The keys that an issuer publishes.

    Args:
        issuer: its address, below which it describes itself.
        make_client: makes what fetches.
    """

    def __init__(self, issuer: str, make_client: Callable[[], httpx.AsyncClient] = httpx.AsyncClient) -> None:
        self._issuer = issuer.rstrip("/")
        self._make_client = make_client
        self._keys: KeySet | None = None
        self._asked_at = float("-inf")
        self._fetched_at = float("-inf")
        self._asking = trio.Lock()

    async def current(self) -> KeySet:
        """Give the keys, fetched where there are none, or old ones.

        Raises:
            Unauthenticated: there are none, and they cannot be had now.

        Cancellation: while they are fetched.
        """
        if self._keys is None or trio.current_time() - self._fetched_at > _KEPT_SECONDS:
            await self.renewed()
        if self._keys is None:
            raise Unauthenticated("tokens cannot be verified now: the keys of their issuer cannot be had")
        return self._keys

    async def renewed(self) -> bool:
        """Fetch the keys unless that was done just now; False where it was, or where they cannot be had.

        Cancellation: while they are fetched.
        """
        asked_at = self._asked_at
        async with self._asking:
            if self._asked_at != asked_at:
                # Somebody else has asked meanwhile.
                return self._fetched_at >= self._asked_at
            if trio.current_time() - self._asked_at < _RENEWAL_SECONDS:
                return False
            self._asked_at = trio.current_time()
            try:
                about = {"url.full": self._issuer + _DISCOVERY}
                with trio.fail_after(_FETCH_SECONDS), part_of_server("fetch keys of tokens", about):
                    self._keys = await self._fetch()
            except (httpx.HTTPError, httpx.InvalidURL, trio.TooSlowError, ConfigError, ValueError, OSError) as error:
                log.error("keys of the issuer cannot be had", issuer=self._issuer, error=repr(error))  # noqa: TRY400 - theirs
                return False
            self._fetched_at = trio.current_time()
            return True

    async def _fetch(self) -> KeySet:
        async with self._make_client() as client:
            told = await _document(client, f"{self._issuer}{_DISCOVERY}")
            name = told.get("issuer")
            if not isinstance(name, str) or name.rstrip("/") != self._issuer:
                raise ValueError(f"the issuer calls itself {name!r}")
            address = told.get("jwks_uri")
            if not isinstance(address, str) or urlsplit(address).scheme not in {"https", urlsplit(self._issuer).scheme}:
                raise ValueError(f"the issuer has its keys at {address!r}")
            return read_key_set(await _document(client, address), address)


async def _document(client: httpx.AsyncClient, address: str) -> dict[str, Any]:
    """Fetch an object of JSON, which is bounded.

    Raises:
        httpx.HTTPError: it cannot be had.
        ValueError: it is too large, or no object.
    """
    content = b""
    async with client.stream("GET", address) as response:
        response.raise_for_status()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > _MOST_BYTES:
                raise ValueError(f"{address} has more than {_MOST_BYTES} bytes")
    document = orjson.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"{address} has no object")  # noqa: TRY004 - the answer is wrong, not the code
    return document
