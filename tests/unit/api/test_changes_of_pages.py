"""Changes of the server that browsers ask for: on behalf of the server's own page, and of nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.core.callers import Caller, Scopes, current_caller
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.answers import Cors
from ovmstrio.wire.http.router import Route
from tests.support.peers import LOCAL, REMOTE
from tests.unit.api.rest.servers import stack

PATHS: Final = (
    "/v1/config/reload",
    "/v2/logging",
    "/v2/profile",
    "/v2/repository/models/echo/load",
    "/v2/repository/models/echo/unload",
    "/v2/systemsharedmemory/region/cats/register",
    "/v2/systemsharedmemory/unregister",
)
FOREIGN: Final = {"host": "localhost:8000", "origin": "https://page.example"}


async def _post(folder: Path, path: str, headers: dict[str, str], **options: Any) -> HttpAnswer:
    """Ask with a body that is no question, so that whoever may ask is told of that."""
    async with stack(folder) as (plane, _, _):
        router = make_router(plane, **options)
        route = router.find("POST", path)
        assert isinstance(route, Route)
        return await router.answer(
            route, HttpRequest("POST", path, headers=tuple(headers.items()), peer=LOCAL, body=b'{"odd": 1}')
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        FOREIGN,
        {"host": "localhost:8000", "origin": "null"},
        {"host": "localhost:8000", "origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"host": "localhost:8000", "sec-fetch-site": "cross-site"},
    ],
)
async def test_pages_of_other_origins_change_nothing(tmp_path: Path, path: str, headers: dict[str, str]) -> None:
    """Without a question beforehand a browser would send what they post, from this machine."""
    answer = await _post(tmp_path, path, headers)
    assert answer.status == 403, answer.content
    assert b"no page of another origin" in answer.content
    assert b"--allowed_origins" in answer.content


@pytest.mark.parametrize("path", PATHS)
async def test_a_name_that_leads_here_makes_no_page_the_servers_own(tmp_path: Path, path: str) -> None:
    """It may be anybody's, with the page that the browser got from it before; who is no browser may use it."""
    names = {"host": "page.example:8000", "origin": "http://page.example:8000"}
    answer = await _post(tmp_path / "a", path, names)
    assert answer.status == 403, answer.content
    assert b"localhost" in answer.content
    assert (await _post(tmp_path / "b", path, {"host": "page.example:8000"})).status != 403
    assert (await _post(tmp_path / "c", path, names, allows_remote_admin=True)).status != 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
async def test_the_servers_own_page_changes_what_its_machine_may(tmp_path: Path, host: str) -> None:
    """At a name that is nobody else's."""
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await _post(tmp_path, "/v2/profile", own)).status == 400


@pytest.mark.parametrize(
    ("origins", "status"),
    [("https://page.example", 400), ("https://other.example, https://page.example", 400), ("*", 403), ("", 403)],
)
async def test_pages_that_are_named_may_ask(tmp_path: Path, origins: str, status: int) -> None:
    """All of them together are no name: that is for those that infer."""
    assert (await _post(tmp_path, "/v2/profile", FOREIGN, cors=Cors(origins))).status == status


@pytest.mark.parametrize(("origin", "status"), [("http://models.example", 400), ("http://page.example", 403)])
async def test_callers_that_are_known_come_by_any_name_of_the_server(tmp_path: Path, origin: str, status: int) -> None:
    """And not for another page: browsers show certificates unasked."""
    token = current_caller.set(Caller("boss", "certificate", Scopes.parse(["admin"])))
    try:
        answer = await _post(tmp_path, "/v2/profile", {"host": "models.example", "origin": origin})
    finally:
        current_caller.reset(token)
    assert answer.status == status


async def test_who_may_not_ask_is_told_so_before_the_body_is_read(tmp_path: Path) -> None:
    """A profile is none of another machine's, whatever is wrong with what it sends."""
    async with stack(tmp_path) as (plane, _, _):
        router = make_router(plane)
        route = router.find("POST", "/v2/profile")
        assert isinstance(route, Route)
        answer = await router.answer(route, HttpRequest("POST", route.path, peer=REMOTE, body=b"{"))
    assert answer.status == 403
