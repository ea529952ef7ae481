"""Loader of the images that messages name: data URLs, files below one folder, and URLs of allowed hosts.

A URL of a client must not reach the server's own network. The loader resolves a host itself, refuses private addresses,
and connects to the address that it has checked; a redirect is a new URL.
"""

from __future__ import annotations

import base64
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx
import trio

from ovmstrio.core.errors import InvalidField, Overloaded
from ovmstrio.core.generation import ALL_DOMAINS, Image
from ovmstrio.util.regular_files import open_regular
from ovmstrio.util.response_bodies import read_limited
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from ovmstrio.core.generation import Conversation, MediaPolicy

MAX_IMAGES: Final = 32
"""Limit of the images of a request."""
MAX_IMAGE_BYTES: Final = 20 * 2**20
"""Limit of an encoded image; :data:`MAX_TOTAL_BYTES` is that of all images of a request."""
MAX_TOTAL_BYTES: Final = 64 * 2**20
MAX_HELD_BYTES: Final = 2**30
"""Limit of the encoded images of all requests of a model."""
FETCH_SECONDS: Final = 20.0
"""Time limit of a fetch, from the resolution of its host to the last byte."""

_MAX_REDIRECTS: Final = 3
_MAX_FETCHES: Final = 32  # concurrent fetches of one model
_SHOWN_CHARACTERS: Final = 120
_OK: Final = 200
_MAX_PORT: Final = 2**16
_PORTS: Final = {"http": 80, "https": 443}
_TRANSLATED: Final = IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48")
"""Networks of NAT64, whose addresses contain one of IPv4."""

Addresses = list[tuple[Any, ...]]


class _Refused(Exception):
    """An image was refused for a reason."""


class MediaLoader:
    """Loads images; ``resolve`` and ``connect`` replace the resolver and the connections of tests."""

    def __init__(
        self,
        policy: MediaPolicy,
        resolve: Callable[[str, int], Awaitable[Addresses]] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._domains = {_host_of(domain) for domain in policy.domains}
        self._folder = policy.folder
        self._resolve = resolve or _resolve
        self._transport = transport
        self._fetches = trio.CapacityLimiter(_MAX_FETCHES)
        self._held_bytes = 0

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    @asynccontextmanager
    async def loading(self, conversation: Conversation) -> AsyncIterator[Conversation]:
        """Load the images of a conversation, and hold them while the block lasts.

        Raises:
            InvalidField: on entering: an image is not allowed, cannot be read, or is too large.
            Overloaded: on entering: the images of all requests need too much memory.
        """
        loaded = await self.load(conversation)
        size = sum(len(image.source) for image in loaded.images)
        if self._held_bytes + size > MAX_HELD_BYTES:
            message = f"the images of running and queued requests have {self._held_bytes} bytes; try again later"
            raise Overloaded(message, retry_after_seconds=1)
        self._held_bytes += size
        try:
            yield loaded
        finally:
            self._held_bytes -= size

    async def load(self, conversation: Conversation) -> Conversation:
        """Return a conversation with loaded images; InvalidField as of :meth:`loading`."""
        images = conversation.images
        if len(images) > MAX_IMAGES:
            message = f"expected at most {MAX_IMAGES} images"
            raise InvalidField(message, field=images[MAX_IMAGES].field, got=str(len(images)))
        loaded: list[Image] = []
        for image in images:
            left = MAX_TOTAL_BYTES - sum(len(each.source) for each in loaded)
            try:
                source = await self._load(image.source, min(left, MAX_IMAGE_BYTES))
            except _Refused as error:
                raise InvalidField(f"{image.field}: {error}", field=image.field) from None
            loaded.append(Image(source, image.field))
        return replace(conversation, images=tuple(loaded))

    async def _load(self, source: str | bytes, max_bytes: int) -> bytes:
        if isinstance(source, bytes):
            return _checked(source, max_bytes)
        scheme = source[: source.find(":")].lower() if ":" in source[:8] else ""
        if scheme == "data":
            return await trio.to_thread.run_sync(_decode_data_url, source, max_bytes)
        if scheme in _PORTS:
            return await self._fetch(source, max_bytes)
        if scheme == "file" or source.startswith("/"):
            if self._folder is None:
                raise _Refused("local files are not allowed; start the server with --allowed-local-media-path")
            return await trio.to_thread.run_sync(_read_file, self._folder, source, max_bytes)
        raise _Refused(f"expected a data, http, https or file URL, got {cut(source, _SHOWN_CHARACTERS)!r}")

    async def _fetch(self, source: str, max_bytes: int) -> bytes:
        async with self._fetches:
            with trio.move_on_after(FETCH_SECONDS):
                # A connection is not used again: its certificate was checked for the host of one URL only.
                async with httpx.AsyncClient(
                    verify=self._tls,
                    trust_env=False,
                    follow_redirects=False,
                    timeout=FETCH_SECONDS,
                    transport=self._transport,
                ) as client:
                    return await self._follow(client, source, max_bytes)
        raise _Refused(f"the image was not received within {FETCH_SECONDS:g} s")

    async def _follow(self, client: httpx.AsyncClient, source: str, max_bytes: int) -> bytes:
        url = _url_of(source)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check_domain(url)
            try:
                answer = await self._get(client, url, max_bytes)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise _Refused(f"{url.host} does not answer: {str(error) or type(error).__name__}") from None
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise _Refused(f"more than {_MAX_REDIRECTS} redirects")

    def _check_domain(self, url: httpx.URL) -> None:
        if url.scheme not in _PORTS or url.userinfo or not url.host or not (url.port or 1) < _MAX_PORT:
            raise _Refused("expected a URL of http or https with a host and without a password")
        if not self._domains & {ALL_DOMAINS, _host_of(url.host)}:
            raise _Refused(f"images of {cut(url.host, _SHOWN_CHARACTERS)} are not allowed (--allowed-media-domains)")

    async def _get(self, client: httpx.AsyncClient, url: httpx.URL, max_bytes: int) -> bytes | httpx.URL:
        """Return the body, or the URL of a redirect."""
        host = url.raw_host.decode("ascii")
        port = url.port or _PORTS[url.scheme]
        found = await self._resolve(host, port)
        addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
        if not addresses or not all(map(_is_public, addresses)):
            raise _Refused(f"{cut(url.host, _SHOWN_CHARACTERS)} has an address that is not public")
        request = client.build_request(
            "GET",
            url.copy_with(host=addresses[0]),
            headers={"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": host},
        )
        response = await client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                return url.join(response.headers["location"])
            if response.status_code != _OK:
                raise _Refused(f"{url.host} answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise _Refused(f"{url.host} sends a compressed image file")
            return _checked(bytes(await read_limited(response, max_bytes)), max_bytes)
        finally:
            await response.aclose()


async def _resolve(host: str, port: int) -> Addresses:
    return await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)


def _host_of(domain: str) -> str:
    return domain.strip().lower().rstrip(".")


def _url_of(source: str) -> httpx.URL:
    try:
        return httpx.URL(source)
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise _Refused(f"the URL is invalid: {error}") from None


def _is_public(address: str) -> bool:
    """Return whether an address is on the public internet, also the IPv4 address that an IPv6 address contains."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        is_translated = parsed.sixtofour or parsed.teredo or any(parsed in network for network in _TRANSLATED)
        if is_translated or parsed.is_site_local:
            return False
        parsed = parsed.ipv4_mapped or parsed
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _checked(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise _Refused(f"expected at most {MAX_IMAGE_BYTES} bytes, and {MAX_TOTAL_BYTES} of all images of a request")
    return data


def _decode_data_url(source: str, max_bytes: int) -> bytes:
    head, comma, data = source.partition(",")
    if not comma:
        raise _Refused("the data URL has no comma; expected data:image/png;base64,...")
    try:
        if head.rpartition(";")[2].strip().lower() == "base64":
            return _checked(base64.b64decode("".join(data.split()), validate=True), max_bytes)
        return _checked(unquote_to_bytes(data), max_bytes)
    except ValueError as error:
        raise _Refused(f"the data URL has no valid base64: {error}") from None


def _read_file(folder: Path, source: str, max_bytes: int) -> bytes:
    """Read a file below a folder, also if links lead out of it or change meanwhile."""
    try:
        path = source
        if not source.startswith("/"):
            parts = urlsplit(source)
            if parts.netloc not in {"", "localhost"}:
                raise _Refused("a file URL names no other host")
            path = unquote(parts.path)
        root, real = os.path.realpath(folder), os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise _Refused("the file is not below --allowed-local-media-path")
        with open_regular(real) as file:
            if os.path.commonpath([root, os.path.realpath(f"/proc/self/fd/{file.fileno()}")]) != root:
                raise _Refused("the file is not below --allowed-local-media-path")
            return _checked(file.read(max_bytes + 1), max_bytes)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise _Refused(f"the file cannot be read: {reason}") from None
