from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from ovmstrio.auth.authentication import strip_credentials
from ovmstrio.core.callers import Caller, Scopes, current_caller
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.transport.http.responses import Cors
from ovmstrio.transport.http.router import Route
from tests.support.callers import LOCAL
from tests.unit.protocols.servers import stack

PATHS: Final = (
    "/v1/config/reload",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v2/logging",
    "/v2/profile",
    "/v2/repository/models/echo/load",
    "/v2/repository/models/echo/unload",
    "/v2/systemsharedmemory/region/cats/register",
    "/v2/systemsharedmemory/unregister",
)
FOREIGN: Final = {"host": "localhost:8000", "origin": "https://page.example"}


async def _post(folder: Path, path: str, headers: dict[str, str], **options: Any) -> HttpAnswer:
    async with stack(folder) as (plane, _, _):
        router = make_rest_router(plane, **options)
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
async def test_pages_of_other_origins_are_refused(tmp_path: Path, path: str, headers: dict[str, str]) -> None:
    answer = await _post(tmp_path, path, headers)
    assert answer.status == 403, answer.content
    assert b"cross-origin change refused" in answer.content
    assert b"--allowed-origins" in answer.content


@pytest.mark.parametrize("path", PATHS)
async def test_pages_under_an_unknown_host_name_are_refused_and_other_clients_are_not(
    tmp_path: Path, path: str
) -> None:
    names = {"host": "page.example:8000", "origin": "http://page.example:8000"}
    answer = await _post(tmp_path / "a", path, names)
    assert answer.status == 403, answer.content
    assert b"localhost" in answer.content
    assert (await _post(tmp_path / "b", path, {"host": "page.example:8000"})).status != 403
    assert (await _post(tmp_path / "c", path, names, allows_remote_admin=True)).status != 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
async def test_the_servers_own_page_is_served(tmp_path: Path, host: str) -> None:
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await _post(tmp_path, "/v2/profile", own)).status == 400


@pytest.mark.parametrize(
    ("origins", "status"),
    [("https://page.example", 400), ("https://other.example, https://page.example", 400), ("*", 403), ("", 403)],
)
async def test_pages_of_configured_origins_are_served(tmp_path: Path, origins: str, status: int) -> None:
    assert (await _post(tmp_path, "/v2/profile", FOREIGN, cors=Cors(origins))).status == status


async def test_the_first_refused_preflight_is_logged_with_the_option(tmp_path: Path) -> None:
    path, preflight = "/v2/models/echo/infer", {**FOREIGN, "access-control-request-method": "POST"}
    async with stack(tmp_path) as (plane, _, _):
        for cors, warned in ((None, ["https://page.example"]), (Cors("*"), [])):
            router = make_rest_router(plane, cors=cors)
            with capture_logs() as logs:
                for headers in (FOREIGN, preflight, preflight):
                    found = router.find("OPTIONS", path)
                    assert isinstance(found, HttpAnswer)
                    request = HttpRequest("OPTIONS", path, headers=tuple(headers.items()), peer=LOCAL)
                    await router.refuse(found, request)
            lines = [line for line in logs if line["event"] == "cross-origin requests refused"]
            assert [line["origin"] for line in lines] == warned
            assert all("--allowed-origins" in line["hint"] for line in lines)


@pytest.mark.parametrize(("origin", "status"), [("http://models.example", 400), ("http://page.example", 403)])
async def test_known_callers_may_use_any_host_name_but_no_other_origin(
    tmp_path: Path, origin: str, status: int
) -> None:
    token = current_caller.set(Caller("boss", "certificate", Scopes.parse(["admin"])))
    try:
        answer = await _post(tmp_path, "/v2/profile", {"host": "models.example", "origin": origin})
    finally:
        current_caller.reset(token)
    assert answer.status == status


OTHER = ("accept", "a")


@pytest.fixture
def known(request: pytest.FixtureRequest) -> Iterator[None]:
    token = current_caller.set(Caller("shop", request.param, Scopes()) if request.param else None)
    yield
    current_caller.reset(token)


@pytest.mark.parametrize("known", ["key", "token"], indirect=True)
@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([("authorization", "Bearer k"), OTHER], [OTHER]),
        ([("authorization", "bearer  k"), OTHER], [OTHER]),
        ([("x-api-key", "k"), OTHER], [OTHER]),
        ([("authorization", "Basic own"), ("x-api-key", "k"), OTHER], [("authorization", "Basic own"), OTHER]),
        ([("authorization", "Bearer k"), ("x-api-key", "own")], [("x-api-key", "own")]),
        ([("authorization", "Bearer k"), ("x-api-key", "k")], []),
    ],
)
def test_only_the_credential_that_the_server_used_is_removed(
    known: None, given: list[tuple[str, str]], left: list[tuple[str, str]]
) -> None:
    assert strip_credentials(tuple(given)) == tuple(left)


@pytest.mark.parametrize("known", ["certificate", ""], indirect=True)
def test_headers_stay_if_the_caller_is_not_known_by_a_key(known: None) -> None:
    given = (("authorization", "Bearer own"), ("x-api-key", "own"), OTHER)
    assert strip_credentials(given) == given
