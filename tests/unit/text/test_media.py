"""Images of URLs: which hosts and addresses the server connects to, and what it takes from them."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import httpx
import pytest
import trio
import trio.testing

from ovmstrio.core.errors import InvalidField, Overloaded
from ovmstrio.core.generation import Conversation, Image, MediaPolicy
from ovmstrio.text import media
from ovmstrio.text.media import MediaLoader

PUBLIC: Final = "93.184.216.34"
FILE: Final = b"the file"
FIELD: Final = "messages[0].content[0].image_url.url"


def _file() -> httpx.Response:
    async def parts() -> AsyncIterator[bytes]:
        for part in (FILE[:3], FILE[3:]):
            await trio.lowlevel.checkpoint()
            yield part

    return httpx.Response(200, content=parts())


class Web(httpx.AsyncBaseTransport):
    """Hosts with their addresses, and responses by path."""

    def __init__(self, **paths: Callable[[], httpx.Response]) -> None:
        self.hosts: dict[str, list[str]] = {"a.com": [PUBLIC], "a.com.": [PUBLIC]}
        self.paths: dict[str, Callable[[], httpx.Response]] = {"/a.png": _file}
        self.paths |= {f"/{name}": respond for name, respond in paths.items()}
        self.requests: list[httpx.Request] = []

    async def resolve(self, host: str, port: int) -> list[tuple[Any, ...]]:
        await trio.lowlevel.checkpoint()
        if host in self.hosts:
            return [(0, 0, 0, "", (address, port)) for address in self.hosts[host]]
        if host.endswith(".invalid"):
            raise OSError("name not known")
        return await trio.socket.getaddrinfo(host, port)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        return self.paths[request.url.path]()

    async def load(self, url: str | bytes, *domains: str) -> bytes:
        loader = MediaLoader(MediaPolicy(domains or ("a.com",)), self.resolve, self)
        loaded = await loader.load(Conversation((), images=(Image(url, FIELD),)))
        assert loaded.images[0].field == FIELD
        data = loaded.images[0].source
        assert isinstance(data, bytes)
        return data

    async def refusal(self, url: str, *domains: str) -> str:
        with pytest.raises(InvalidField) as refused:
            await self.load(url, *domains)
        assert refused.value.field == FIELD
        return refused.value.message


def _redirect(location: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(302, headers={"location": location})


async def test_images_come_from_allowed_hosts_at_the_address_that_was_checked() -> None:
    web = Web()
    assert await web.load("https://A.com:8443/a.png?x=1") == FILE
    (request,) = web.requests
    assert str(request.url) == f"https://{PUBLIC}:8443/a.png?x=1"
    assert request.headers["host"] == "a.com:8443"
    assert request.extensions["sni_hostname"] == "a.com"
    assert await web.load("http://a.com./a.png", "b.org", "a.com") == FILE
    web.hosts["c.net"] = ["2606:2800:220:1::1"]
    assert await web.load("http://c.net/a.png", "all") == FILE
    assert str(web.requests[-1].url) == "http://[2606:2800:220:1::1]/a.png"


@pytest.mark.parametrize(
    "url",
    [
        "http://b.org/a.png",
        "http://sub.a.com/a.png",
        "http://xa.com/a.png",
        "http://a.com.b.org/a.png",
        "http://b.org/?a.com",
        "http://b.org#a.com",
        "http://b.org\\@a.com/a.png",
        f"http://{PUBLIC}/a.png",
    ],
)
async def test_other_hosts_are_refused(url: str) -> None:
    web = Web()
    await web.refusal(url)
    assert web.requests == []


async def test_users_in_urls_are_refused() -> None:
    assert "without a password" in await Web().refusal("http://b.org@a.com/a.png")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "0.0.0.0",
        "10.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.168.1.1",
        "224.0.0.1",
        "255.255.255.255",
        "localhost",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::ffff:a9fe:a9fe]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::a00:1]",
        "[2002:7f00:1::]",
        "[2001:0:5ef5:79fd:0:0:80ff:fffe]",
        "[fe80::1]",
        "[fc00::1]",
        "[fec0::1]",
        "[ff02::1]",
    ],
)
async def test_addresses_that_are_not_public_are_refused(host: str) -> None:
    web = Web()
    words = re.compile("not public|Invalid IPv4 address")
    assert words.search(await web.refusal(f"http://{host}/a.png", "all"))
    web.paths["/go"] = _redirect(f"http://{host}/a.png")
    assert words.search(await web.refusal("http://a.com/go", "all"))
    assert [request.url.path for request in web.requests] == ["/go"]


@pytest.mark.parametrize("addresses", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"], []])
async def test_names_of_private_addresses_are_refused(addresses: list[str]) -> None:
    web = Web()
    web.hosts["a.com"] = addresses
    assert "not public" in await web.refusal("http://a.com/a.png")
    assert web.requests == []


async def test_redirects_are_followed_within_the_allowed_hosts() -> None:
    web = Web(go=_redirect("/a.png"), out=_redirect("http://b.org/a.png"), file=_redirect("file:///etc/passwd"))
    web.hosts["b.org"] = [PUBLIC]
    assert await web.load("http://a.com/go") == FILE
    assert "images of b.org are not allowed" in await web.refusal("http://a.com/out")
    assert await web.load("http://a.com/out", "a.com", "b.org") == FILE
    assert "http or https" in await web.refusal("http://a.com/file", "all")
    web.paths["/round"] = _redirect("/round")
    count = len(web.requests)
    assert "more than 3 redirects" in await web.refusal("http://a.com/round")
    assert len(web.requests) == count + 4


async def test_failures_of_hosts_are_refusals() -> None:
    def fail() -> httpx.Response:
        raise httpx.ConnectError("refused")

    web = Web(
        absent=lambda: httpx.Response(404),
        zipped=lambda: httpx.Response(200, headers={"content-encoding": "gzip"}),
        down=fail,
        nowhere=_redirect("http://[::1"),
    )
    assert "status 404" in await web.refusal("http://a.com/absent")
    assert "compressed" in await web.refusal("http://a.com/zipped")
    assert "does not answer: refused" in await web.refusal("http://a.com/down")
    await web.refusal("http://a.com/nowhere")
    assert "a.invalid does not answer: name not known" in await web.refusal("http://a.invalid/a.png", "all")
    await web.refusal("http:///a.png", "all")
    await web.refusal("http://a.com:99999/a.png")


async def test_a_slow_body_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async def body() -> AsyncIterator[bytes]:
        while True:
            await trio.sleep(1)
            yield b"x"

    assert "within 20 s" in await Web(body=lambda: httpx.Response(200, content=body())).refusal("http://a.com/body")
    assert trio.current_time() < media.FETCH_SECONDS + 2


async def test_images_of_a_request_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_TOTAL_BYTES", 20)
    url = f"data:;base64,{base64.b64encode(FILE).decode()}"
    loader = MediaLoader(MediaPolicy())
    loaded = await loader.load(Conversation((), images=(Image(url, "a"), Image(FILE, "b"))))
    assert [image.source for image in loaded.images] == [FILE, FILE]
    with pytest.raises(InvalidField, match="c: expected at most"):
        await loader.load(Conversation((), images=(Image(url, "a"), Image(url, "b"), Image(url, "c"))))


async def test_images_of_all_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_HELD_BYTES", 2 * len(FILE))
    loader = MediaLoader(MediaPolicy())
    conversation = Conversation((), images=(Image(FILE, FIELD),))
    async with loader.loading(conversation) as loaded, loader.loading(conversation):
        assert loaded.has_loaded_images
        with pytest.raises(Overloaded, match="images of running and queued requests have 16 bytes"):
            async with loader.loading(conversation):
                pass
    async with loader.loading(conversation), loader.loading(conversation):
        pass


async def test_data_urls_have_base64_or_percent_encoding() -> None:
    web = Web()
    encoded = base64.b64encode(b"\xff\xfe\xfd").decode()
    for url in (
        f"data:image/png;base64,{encoded}",
        f"DATA:;BASE64,\n{encoded[:2]}\r\n{encoded[2:]}",
        "data:,%FF%fe%fd",
    ):
        assert await web.load(url) == b"\xff\xfe\xfd"


async def test_urls_are_refused_by_default() -> None:
    loader = MediaLoader(MediaPolicy())
    with pytest.raises(InvalidField, match="--allowed-media-domains"):
        await loader.load(Conversation((), images=(Image("http://a.com/a.png", FIELD),)))
    with pytest.raises(InvalidField, match="--allowed-local-media-path"):
        await loader.load(Conversation((), images=(Image("/etc/passwd", FIELD),)))
