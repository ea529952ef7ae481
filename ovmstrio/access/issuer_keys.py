"""The keys of an OpenID Connect issuer, fetched when a token needs them and again when they may have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx
import orjson
import structlog
import trio

from ovmstrio.access.tokens import read_key_set
from ovmstrio.core.errors import ConfigError, Unauthenticated
from ovmstrio.core.tracing import part_of_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from joserfc.jwk import KeySet

__all__ = ["IssuerKeys"]

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
