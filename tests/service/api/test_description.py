"""A server tells what it serves: an overview, a document of all calls with examples that work, a page to try them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ovmstrio_samples
from tests.support import ir
from tests.support.projects import write_project
from tests.support.served_in_thread import ServedInThread, serving_in_thread

SAMPLES = Path(ovmstrio_samples.__file__).parent


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
            {"name": "asked", "path": str(root / "asked")},
        ],
    }
    write_project(root / "asked", "class Handler:\n    def handle_get(self):\n        return 7\n")
    (root / "config.json").write_text(json.dumps(config))
    with serving_in_thread(config_path=root / "config.json") as running:
        yield running


def test_the_document_has_an_example_for_each_servable_that_works_as_it_is(server: ServedInThread) -> None:
    """Whatever is sent as the document says is answered; what would be too large to read says how much to fill in."""
    document = server.ask("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    posts = {path: told["post"] for path, told in document["paths"].items() if "post" in told}
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
        for path, told in posts.items():
            if path == "/iris" or "large" in path:
                continue
            answer = client.post(path, json=_example(told))
            assert answer.status_code == 200, (path, answer.text)
        # A sequence that an example has left open would be in the way of the next one.
        assert client.post("/v2/models/sums/infer", json=_example(posts["/v2/models/sums/infer"])).status_code == 200
        for path in (path for path, told in document["paths"].items() if "get" in told and path != "/metrics"):
            assert client.get(path).status_code in {200, 503}, path
    assert posts["/v2/models/large/infer"]["description"] == "x: FP32 [1, 3, 64, 64]; fill in 12288 values"


def _example(told: dict[str, Any]) -> Any:
    return told["requestBody"]["content"]["application/json"]["example"]


def test_a_handler_has_the_verbs_that_it_has_methods_for(server: ServedInThread) -> None:
    """One that is only asked for something takes no body."""
    paths = server.ask("GET", "/openapi.json").json()["paths"]
    assert list(paths["/asked"]) == ["get"]
    assert server.ask("GET", "/asked").json() == 7
    assert "post" in paths["/iris"]


def test_what_cannot_be_called_has_no_path(server: ServedInThread) -> None:
    """It is in the overview, with its state."""
    assert not [path for path in server.ask("GET", "/openapi.json").json()["paths"] if "broken" in path]


def test_the_root_tells_what_is_here_and_where_to_go_on(server: ServedInThread) -> None:
    """As JSON for programs; a browser is led to the page."""
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
    assert (browser.status_code, browser.headers["location"]) == (302, "/v2/docs")


def test_the_page_loads_nothing_from_other_hosts(server: ServedInThread) -> None:
    """Neither by its text nor by what its headers allow."""
    page = server.ask("GET", "/v2/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(""", page.text)
    assert "innerHTML" not in page.text
