"""What pages of other origins may do, which is nothing unless the operator allows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ovmstrio.wire.http.answers import Cors
from tests.unit.api.rest.servers import BODY, Serving, serving_rest

PAGE = {"Origin": "https://page.example"}
ALLOW = "access-control-allow-"


def _allowed(answer: Any) -> dict[str, str]:
    """Give the headers of an answer that are for browsers."""
    return {name.removeprefix(ALLOW): value for name, value in answer.headers.items() if name.startswith(ALLOW)}


async def test_nothing_is_allowed_by_default(serving: Serving) -> None:
    """No header is added, and a preflight is no known verb."""
    assert _allowed(await serving.get("/v2", headers=PAGE)) == {}
    preflight = await serving.with_http(lambda client: client.options("/v2/models/echo/infer", headers=PAGE))
    assert preflight.status_code == 406


async def test_everything_may_be_allowed(tmp_path: Path) -> None:
    """Every answer says so: metadata, inferences, refusals and preflights of any path."""
    expected = {"origin": "*", "methods": "*", "headers": "*"}
    async with serving_rest(tmp_path, front_end={"cors": Cors("*")}) as server:
        assert _allowed(await server.get("/v2", headers=PAGE)) == expected
        assert _allowed(await server.get("/nothing", headers=PAGE)) == expected
        inference = await server.post("/v2/models/echo/infer", content=BODY, headers=PAGE)
        assert (inference.status_code, _allowed(inference)) == (200, expected)
        for path in ("/", "/v2/models/echo/infer", "/nothing/at/all"):
            preflight = await server.with_http(partial(httpx.Client.options, url=path, headers=PAGE))
            assert (preflight.status_code, preflight.content, _allowed(preflight)) == (200, b"", expected)


@pytest.mark.parametrize(
    ("origin", "named"), [("https://page.example", True), ("http://b", True), ("http://c", False), (None, False)]
)
async def test_of_several_origins_the_one_that_asks_is_named(
    tmp_path: Path, origin: str | None, *, named: bool
) -> None:
    """Browsers take one origin only, and caches must tell the answers apart."""
    cors = Cors("https://page.example, http://b", "POST", "Content-Type", credentials=True)
    async with serving_rest(tmp_path, front_end={"cors": cors}) as server:
        answer = await server.get("/v2", headers={"Origin": origin} if origin else {})
    expected = {"origin": origin, "methods": "POST", "headers": "Content-Type", "credentials": "true"}
    assert _allowed(answer) == (expected if named else {})
    assert answer.headers["vary"] == "Origin"
