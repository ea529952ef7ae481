from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ovmstrio.samples
from tests.support import ir
from tests.support.projects import write_project
from tests.support.served_in_thread import ServedInThread, serving_in_thread

SAMPLES = Path(ovmstrio.samples.__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve models, graphs and a handler, and one model that cannot be loaded."""
    root = tmp_path_factory.mktemp("described")
    for name in ("counter_stream", "handler_iris"):
        shutil.copytree(SAMPLES / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    models = {
        "dummy": ir.save(ir.dummy(), root / "models", "dummy"),
        "a name with <odd> letters": ir.save(ir.sum_of_two(), root / "models", "sum"),
        "texts": ir.save(ir.string_passthrough(), root / "models", "texts"),
        "large": ir.save(ir.passthrough("FP32", (1, 3, 64, 64)), root / "models", "large"),
        "broken": root,
    }
    listed = [{"config": {"name": name, "base_path": str(base)}} for name, base in models.items()]
    sums = {"name": "sums", "base_path": str(ir.save(ir.accumulator(), root / "models", "sums")), "stateful": True}
    config = {
        "model_config_list": [*listed, {"config": sums}],
        "mediapipe_config_list": [{"name": "words", "base_path": str(root / "counter_stream")}],
        "handler_config_list": [
            {"name": "iris", "path": str(root / "handler_iris")},
            {"name": "getter", "path": str(root / "getter")},
        ],
    }
    write_project(root / "getter", "class Handler:\n    def handle_get(self):\n        return 7\n")
    (root / "config.json").write_text(json.dumps(config))
    with serving_in_thread(config_path=root / "config.json") as running:
        yield running


def test_the_openapi_document_has_a_working_example_for_each_loaded_servable(server: ServedInThread) -> None:
    document = server.ask("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    posts = {path: each["post"] for path, each in document["paths"].items() if "post" in each}
    assert not [path for path in document["paths"] if "broken" in path]
    odd = "/v2/models/a%20name%20with%20%3Codd%3E%20letters"
    assert {path for path in posts if path.endswith("/infer")} == {
        "/v2/models/dummy/infer",
        f"{odd}/infer",
        "/v2/models/texts/infer",
        "/v2/models/large/infer",
        "/v2/models/words/infer",
        "/v2/models/sums/infer",
    }
    assert "/v2/models/words/generate_stream" in posts
    assert "/iris" in posts
    with httpx.Client(base_url=f"http://{server.http}", timeout=60, trust_env=False) as client:
        for path, post in posts.items():
            if path == "/iris" or "large" in path:
                continue
            answer = client.post(path, json=_example(post))
            assert answer.status_code == 200, (path, answer.text)
        # A sequence that an example has left open would be in the way of the next one.
        assert client.post("/v2/models/sums/infer", json=_example(posts["/v2/models/sums/infer"])).status_code == 200
        for path in (path for path, each in document["paths"].items() if "get" in each and path != "/metrics"):
            assert client.get(path).status_code in {200, 503}, path
    assert posts["/v2/models/large/infer"]["description"] == "x: FP32 [1, 3, 64, 64]; fill in 12288 values"


def _example(post: dict[str, Any]) -> Any:
    return post["requestBody"]["content"]["application/json"]["example"]


def test_a_handler_is_described_with_the_verbs_of_its_methods(server: ServedInThread) -> None:
    paths = server.ask("GET", "/openapi.json").json()["paths"]
    assert list(paths["/getter"]) == ["get"]
    assert server.ask("GET", "/getter").json() == 7
    assert "post" in paths["/iris"]


def test_the_root_is_an_overview_with_working_links_and_redirects_browsers(server: ServedInThread) -> None:
    overview = server.ask("GET", "/").json()
    assert {(each["name"], each["kind"]) for each in overview["services"]} >= {
        ("dummy", "model"),
        ("words", "graph"),
        ("iris", "handler"),
    }
    assert overview["ready"] is False
    assert "broken" in overview["reason"]
    for path in overview["next"].values():
        assert server.ask("GET", path).status_code in {200, 503}, path
    browser = server.ask("GET", "/", headers={"Accept": "text/html,*/*"})
    assert (browser.status_code, browser.headers["location"]) == (302, "/console")


@pytest.mark.parametrize("mode", ["off", "local", "on"])
def test_browsers_are_led_to_the_console_where_they_may_open_it(tmp_path: Path, mode: str) -> None:
    (tmp_path / "config.json").write_text('{"model_config_list": []}')
    with serving_in_thread(config_path=tmp_path / "config.json", console=mode) as server:
        for host in ("localhost", "models.example"):
            is_open = mode == "on" or (mode == "local" and host == "localhost")
            browser = server.ask("GET", "/", headers={"Accept": "text/html", "Host": host})
            assert browser.headers["location"] == ("/console" if is_open else "/v2/docs")
            page = server.ask("GET", "/v2/docs", headers={"Host": host})
            assert ('<a href="/console">' in page.text, "ovmstrio" in page.text) == (is_open, True)
            assert server.ask("GET", "/", headers={"Host": host}).json()["services"] == []
        page = server.ask("GET", "/console/page/main.js")
        assert ("/v2/docs" in page.text) == (mode != "off")


def test_the_documentation_page_loads_nothing_from_other_hosts(server: ServedInThread) -> None:
    page = server.ask("GET", "/v2/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(""", page.text)
    assert "innerHTML" not in page.text
