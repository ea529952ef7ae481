"""Verification of JSON Web Tokens with keys of a file or an OpenID Connect issuer."""

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
from ovmstrio.core.tracing import client_span
from ovmstrio.util.response_bodies import read_limited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.tracing import StartRootSpan

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
"""Public-key algorithms only: with symmetric ones, every verifier could sign."""
_SYMMETRIC: Final = "oct"
_MAX_SUBJECT_CHARACTERS: Final = 256
"""Maximum length of ``sub``, the caller's name in logs and events."""
_MAX_CACHE_SECONDS: Final = 300.0
"""Maximum time until a token is verified again."""


class SigningKeys(Protocol):
    """Public keys of a token issuer."""

    async def current(self) -> KeySet:
        """Return the keys; raises Unauthenticated if there are none."""

    async def renewed(self, known: KeySet | None) -> bool:
        """Fetch newer keys than the known ones; return False if there are none."""


class FileKeys:
    """Keys of a file, replaced by the file watcher."""

    def __init__(self, keys: KeySet) -> None:
        self.keys = keys

    async def current(self) -> KeySet:
        """Return the keys.  Not a checkpoint."""
        return self.keys

    async def renewed(self, known: KeySet | None) -> bool:  # noqa: ARG002 - as the protocol
        """Return False: the file watcher replaces the keys.  Not a checkpoint."""
        return False


def parse_key_set(document: Any, origin: str) -> KeySet:
    """Parse a JSON Web Key Set; raises ConfigError if invalid or not public."""
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise ConfigError([Problem("not a JSON Web Key Set", origin, expected='{"keys": [...]}')])
    if any(key.get("kty") == _SYMMETRIC for key in keys):
        raise ConfigError([Problem("the key set has a secret key", origin, expected="public keys only")])
    try:
        return KeySet.import_key_set({"keys": keys})
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise ConfigError([Problem(f"invalid key: {error}", origin)]) from None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Required claims.

    Attributes:
        issuer: ``iss``; empty for any.
        audience: one of ``aud``; empty for any.
        leeway_seconds: clock skew tolerance.
    """

    issuer: str = ""
    audience: str = ""
    leeway_seconds: int = 60


class JwtVerifier:
    """Token verifier."""

    def __init__(self, keys: SigningKeys, rules: TokenRules, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._rules = rules
        self._clock = clock
        required: dict[str, Any] = {"sub": {"essential": True}, "exp": {"essential": True}}
        if rules.issuer:
            required["iss"] = {"essential": True, "value": rules.issuer}
        if rules.audience:
            required["aud"] = {"essential": True, "value": rules.audience}
        self._registry = jwt.JWTClaimsRegistry(now=lambda: int(clock()), leeway=rules.leeway_seconds, **required)

    async def verify(self, token: str) -> VerifiedClaims:
        """Verify a token.

        Raises:
            Unauthenticated: the token is invalid; the message has the reason and no content of the token.
        """
        try:
            claims = await self._claims(token)
            self._registry.validate(claims)
            until = float(claims["exp"]) + self._rules.leeway_seconds
        except (JoseError, ValueError, TypeError, OverflowError, RecursionError) as error:
            reason = getattr(error, "description", "") or getattr(error, "error", "") or type(error).__name__
            raise Unauthenticated(f"invalid token: {reason}", is_wrong=True) from None
        if len(claims["sub"]) > _MAX_SUBJECT_CHARACTERS or not claims["sub"].isprintable():
            raise Unauthenticated("invalid token: subject too long or not printable", is_wrong=True)
        return VerifiedClaims(claims["sub"], _scopes(claims), min(until, self._clock() + _MAX_CACHE_SECONDS))

    async def _claims(self, token: str) -> dict[str, Any]:
        keys = await self._keys.current()
        try:
            return jwt.decode(token, keys, algorithms=_ALGORITHMS).claims
        except InvalidKeyIdError:
            # The issuer may have rotated its keys.
            if not await self._keys.renewed(keys):
                raise
        return jwt.decode(token, await self._keys.current(), algorithms=_ALGORITHMS).claims


def _scopes(claims: Mapping[str, Any]) -> Scopes:
    scope = claims.get("scope", claims.get("scp", ""))
    texts = scope.split() if isinstance(scope, str) else scope
    return Scopes.parse_known(text for text in texts if isinstance(text, str)) if isinstance(texts, list) else Scopes()


# OpenID Connect

log = structlog.get_logger(__name__)

_DISCOVERY: Final = "/.well-known/openid-configuration"
_FETCH_SECONDS: Final = 10.0
_MAX_BYTES: Final = 2**20
_MIN_FETCH_INTERVAL_SECONDS: Final = 30.0
"""Minimum interval of requests to the issuer, whatever tokens are sent."""
_MAX_AGE_SECONDS: Final = 3600.0
"""Maximum age of keys, so that withdrawn keys expire."""


class IssuerKeys:
    """Published keys of an issuer, fetched on demand.

    Args:
        issuer: URL of the issuer.
        start_root_span: starts spans of requests to the issuer; None without tracing.
    """

    def __init__(
        self,
        issuer: str,
        make_client: Callable[[], httpx.AsyncClient] = httpx.AsyncClient,
        start_root_span: StartRootSpan | None = None,
    ) -> None:
        self._start_root_span = start_root_span
        self._issuer = issuer.rstrip("/")
        self._make_client = make_client
        self._keys: KeySet | None = None
        self._requested_at = float("-inf")
        self._fetched_at = float("-inf")
        self._lock = trio.Lock()

    async def current(self) -> KeySet:
        """Return the keys; fetch missing or old ones.

        Raises:
            Unauthenticated: there are no keys, and they cannot be fetched.
        """
        if self._keys is None or trio.current_time() - self._fetched_at > _MAX_AGE_SECONDS:
            await self.renewed(self._keys)
        if self._keys is None:
            raise Unauthenticated("token verification unavailable: signing keys of the issuer not available")
        return self._keys

    async def renewed(self, known: KeySet | None) -> bool:
        """Fetch newer keys than the known ones; return False if they were fetched just now or cannot be fetched.

        Callers that arrive during a fetch wait for it.
        """
        async with self._lock:
            if self._keys is not known:
                # Another task has fetched them meanwhile.
                return True
            if trio.current_time() - self._requested_at < _MIN_FETCH_INTERVAL_SECONDS:
                return False
            self._requested_at = trio.current_time()
            try:
                about = {"url.full": self._issuer + _DISCOVERY}
                with trio.fail_after(_FETCH_SECONDS), client_span("fetch signing keys", about, self._start_root_span):
                    self._keys = await self._fetch()
            except (httpx.HTTPError, httpx.InvalidURL, trio.TooSlowError, ConfigError, ValueError, OSError) as error:
                log.error("signing keys not fetched", issuer=self._issuer, error=repr(error))  # noqa: TRY400 - an expected error
                return False
            self._fetched_at = trio.current_time()
            return True

    async def _fetch(self) -> KeySet:
        async with self._make_client() as client:
            metadata = await _document(client, f"{self._issuer}{_DISCOVERY}")
            name = metadata.get("issuer")
            if not isinstance(name, str) or name.rstrip("/") != self._issuer:
                raise ValueError(f"unexpected issuer {name!r}")
            address = metadata.get("jwks_uri")
            if not isinstance(address, str) or urlsplit(address).scheme not in {"https", urlsplit(self._issuer).scheme}:
                raise ValueError(f"unsafe jwks_uri {address!r}")
            return parse_key_set(await _document(client, address), address)


async def _document(client: httpx.AsyncClient, address: str) -> dict[str, Any]:
    """Fetch a JSON object of bounded size."""
    async with client.stream("GET", address) as response:
        response.raise_for_status()
        content = await read_limited(response, _MAX_BYTES)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{address} has more than {_MAX_BYTES} bytes")
    document = orjson.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"{address} is not a JSON object")  # noqa: TRY004 - the answer is wrong, not the code
    return document
