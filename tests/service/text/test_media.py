"""Images of real connections: the certificate of the named host, and bodies that end late or never."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import httpx
import pytest
import trio
import trustme

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Conversation, Image, MediaPolicy
from ovmstrio.text.media import MAX_IMAGE_BYTES, MediaLoader

HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
Respond = Callable[[trio.abc.Stream], Awaitable[None]]


class _Local(httpx.AsyncBaseTransport):
    """Transport to a local port, whatever the address of a request is."""

    def __init__(self, port: int, verify: ssl.SSLContext) -> None:
        self._port = port
        self._transport = httpx.AsyncHTTPTransport(verify=verify)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


async def _resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    await trio.lowlevel.checkpoint()
    return [(0, 0, 0, host, ("93.184.216.34", port))]


@asynccontextmanager
async def _served(respond: Respond, certificate: trustme.LeafCert | None = None) -> AsyncIterator[int]:
    async def serve(stream: trio.abc.Stream) -> None:
        try:
            await stream.receive_some(2**16)
            await respond(stream)
            await stream.aclose()
        except trio.BrokenResourceError:
            pass

    listen: Any = partial(trio.serve_tcp, host="127.0.0.1")
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(context)
        listen = partial(trio.serve_ssl_over_tcp, ssl_context=context, host="127.0.0.1", https_compatible=True)
    async with trio.open_nursery() as nursery:
        listeners: Any = await nursery.start(listen, serve, 0)
        listener = getattr(listeners[0], "transport_listener", listeners[0])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _load(port: int, url: str, verify: ssl.SSLContext | None = None) -> bytes:
    transport = _Local(port, verify or ssl.create_default_context())
    with trio.fail_after(60):
        loaded = await MediaLoader(MediaPolicy(("all",)), _resolve, transport).load(
            Conversation((), images=(Image(url, "f"),))
        )
    data = loaded.images[0].source
    assert isinstance(data, bytes)
    return data


async def test_certificates_are_those_of_the_named_host() -> None:
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def respond(stream: trio.abc.Stream) -> None:
        await stream.send_all(HEAD + b"Content-Length: 4\r\n\r\nfile")

    async with _served(respond, authority.issue_cert("a.example")) as port:
        assert await _load(port, "https://a.example/x.png", trusting) == b"file"
        with pytest.raises(InvalidField, match=r"b\.example does not answer"):
            await _load(port, "https://b.example/x.png", trusting)


@pytest.mark.parametrize("has_chunks", [True, False])
async def test_a_body_without_end_is_refused(has_chunks: bool) -> None:
    sent = 0

    async def respond(stream: trio.abc.Stream) -> None:
        nonlocal sent
        await stream.send_all(HEAD + (b"Transfer-Encoding: chunked\r\n\r\n" if has_chunks else b"\r\n"))
        part = bytes(2**16)
        while True:
            await stream.send_all(b"10000\r\n%b\r\n" % part if has_chunks else part)
            sent += len(part)

    async with _served(respond) as port:
        with pytest.raises(InvalidField, match="at most 20971520 bytes"):
            await _load(port, "http://a.example/x.png")
    assert sent < 2 * MAX_IMAGE_BYTES


async def test_a_body_that_breaks_off_is_refused() -> None:
    async def respond(stream: trio.abc.Stream) -> None:
        await stream.send_all(HEAD + b"Content-Length: 400\r\n\r\nfile")

    async with _served(respond) as port:
        with pytest.raises(InvalidField, match=r"a\.example does not answer"):
            await _load(port, "http://a.example/x.png")
