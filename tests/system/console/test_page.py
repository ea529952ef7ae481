"""The console in a browser: each view with each kind of service, live, by keyboard and on a phone."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image

from ovmstrio.access.key_file import digest_of
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.logs import configure_logs
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.tiny_llm import write_tiny_folder
from tests.system.console.conftest import OpenPage
from tests.system.console.served_kinds import MARKUP, MARKUP_NAME, write_services

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=60_000)

PICTURES: Final = os.environ.get("CONSOLE_PICTURES", "")
"""The folder that gets the pictures of the documentation; none are made without."""
_COLOURS: Final = 160
_PICTURED: Final = {"services", "words", "try", "activity", "phone_dark"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve what there is to see."""
    config = write_services(tmp_path_factory.mktemp("services"))
    with serving_in_thread(config_path=config) as served:
        yield served


def _url(server: ServedInThread, view: str = "") -> str:
    return f"http://{server.http.replace('127.0.0.1', 'localhost')}/console#/{view}"


def _picture(page: Page, name: str) -> None:
    if PICTURES and name in _PICTURED:
        page.wait_for_timeout(1200)
        with Image.open(BytesIO(page.screenshot(scale="css"))) as shot:
            shot.convert("RGB").quantize(_COLOURS).save(Path(PICTURES) / f"{name}.png", optimize=True)


def _post(server: ServedInThread, path: str, document: Any) -> httpx.Response:
    return server.ask("POST", path, json=document)


def _dense(values: int = 10) -> dict[str, Any]:
    return {"inputs": [{"name": "b", "shape": [1, values], "datatype": "FP32", "data": [0.5] * values}]}


def _words(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]}


def _calls(server: ServedInThread, rounds: int = 5) -> None:
    for number in range(rounds):
        _post(server, "/v2/models/detector/infer", _dense())
        _post(server, "/v2/models/model/infer", _dense())
        _post(server, "/v2/models/words/generate", {"text": "one two three"})
        _post(server, "/ops/prediction", {"key": ["x"], "value": ["y"]})
        _post(server, "/handler", [1, 2])
        step = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        parameters = {"sequence_id": 7, "sequence_start": not number}
        _post(server, "/v2/models/totals/infer", {"inputs": [step], "parameters": parameters})
    _post(server, "/v2/models/detector/infer", _dense(9))
    _post(server, "/v2/models/words/infer", _words("please fail"))


def test_the_list_tells_states_and_reasons_and_moves_with_calls(server: ServedInThread, open_page: OpenPage) -> None:
    """Counts come without a click, and the failed one says why."""
    with open_page(_url(server), viewport={"width": 1280, "height": 620}) as page:
        row = page.locator("tr[data-name=detector]")
        expect(row.locator(".state")).to_have_text("ready")
        before = int(row.locator("td[data-title=Requests]").inner_text())
        broken = page.locator("tr[data-name=broken]")
        expect(broken.locator(".state")).to_have_text("failed")
        expect(broken.locator(".reason")).to_contain_text("<b>here</b>")
        _calls(server, 3)
        expect(row.locator("td[data-title=Requests]")).to_have_text(str(before + 4))
        expect(row.locator("td[data-title=Errors]")).to_have_text("1")
        _picture(page, "services")
        page.get_by_role("searchbox").fill("op pipeline")
        expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("detector", 4),
        ("words", 3),
        ("ops", 4),
        pytest.param("dag", 1, marks=pytest.mark.slow),
        pytest.param("graph", 1, marks=pytest.mark.slow),
    ],
)
def test_what_is_wired_is_drawn_with_live_counts(
    server: ServedInThread, open_page: OpenPage, name: str, nodes: int
) -> None:
    """Nodes, edges, and how often they ran."""
    with open_page(_url(server, f"services/{name}"), viewport={"width": 1280, "height": 860}) as page:
        boxes = page.locator("svg.drawing .box.node")
        expect(boxes).to_have_count(nodes)
        _calls(server, 2)
        if name in {"detector", "words", "ops"}:
            expect(boxes.first).to_contain_text(re.compile("[1-9][0-9]* runs"))
            expect(boxes.first).to_contain_text(re.compile("p99 [0-9.]+ (µs|ms)"))
        if name == "words":
            expect(page.locator("svg.drawing .edge.back")).to_have_count(1)
            expect(page.locator("svg.drawing .box.failed")).to_contain_text("words")
        page.get_by_text("Nodes as a table").click()
        expect(page.locator("details table tbody tr")).to_have_count(nodes)
        page.get_by_text("Nodes as a table").click()
        _picture(page, name)


def test_a_model_is_tried_and_answers_in_labels_and_tables(server: ServedInThread, open_page: OpenPage) -> None:
    """A picture is dropped on the input; the form of the answer may be chosen."""
    with open_page(_url(server, "services/classifier"), viewport={"width": 1280, "height": 700}) as page:
        expect(page.locator(".facts-list")).to_contain_text("precision")
        page.locator("input[type=file]").set_input_files({"name": "red.png", "mimeType": "image/png", "buffer": _png()})
        expect(page.locator(".input")).to_contain_text("red.png: FP32 [1, 3, 32, 32]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".output")).to_contain_text("FP32 [1, 10]")
        page.get_by_role("button", name="table").click()
        expect(page.locator("table.values td")).to_have_count(10)
        page.get_by_text("This call for the shell").click()
        expect(page.locator(".snippets pre")).to_contain_text("/v2/models/classifier/infer")
        page.locator(".snippets").get_by_role("button", name="Python").click()
        expect(page.locator(".snippets pre")).to_contain_text("tritonclient")
        _picture(page, "try")


def _png() -> bytes:
    written = BytesIO()
    Image.fromarray(np.full((8, 8, 3), (255, 20, 20), np.uint8)).save(written, "PNG")
    return written.getvalue()


@pytest.mark.slow
def test_an_array_is_dropped_and_a_wrong_one_is_refused(server: ServedInThread, open_page: OpenPage) -> None:
    """The server's own words are shown, and the values that were dropped are sent."""

    def npy(values: Any) -> bytes:
        written = BytesIO()
        np.save(written, values)
        return written.getvalue()

    with open_page(_url(server, "services/model"), may_fail=True) as page:
        field = page.locator("input[type=file]")
        kind = "application/octet-stream"
        right = npy(np.arange(10, dtype=np.float32).reshape(1, 10))
        field.set_input_files({"name": "right.npy", "mimeType": kind, "buffer": right})
        expect(page.locator(".input")).to_contain_text("FP32 [1, 10]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("table.values td").last).to_have_text("10")
        field.set_input_files({"name": "wrong.npy", "mimeType": kind, "buffer": npy(np.zeros((1, 9), np.float32))})
        expect(page.locator(".input")).to_contain_text("FP32 [1, 9]")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_contain_text("Invalid input shape")
        page.locator("textarea").first.fill("one, two")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_contain_text("not all of it is a number")


def test_a_stream_grows_and_markup_in_it_stays_text(server: ServedInThread, open_page: OpenPage) -> None:
    """Words of a graph's stream, with what would be code if it were markup."""
    with open_page(_url(server, "services/words")) as page:
        page.locator(".input textarea").fill(f"one {MARKUP} three")
        page.get_by_label("How", exact=True).select_option("stream")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("pre.stream", has_text="THREE")).to_contain_text("<SCRIPT>")
        expect(page.locator("main img, main script")).to_have_count(0)
        assert page.evaluate("window.hit") is None


def test_a_service_whose_name_is_markup_has_that_name_and_nothing_else(
    server: ServedInThread, open_page: OpenPage
) -> None:
    """In every view, in the call to copy, and where the service is asked for."""
    with open_page(_url(server), may_fail=True) as page:
        page.get_by_role("searchbox").fill("onerror")
        page.get_by_role("link", name=MARKUP_NAME).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(MARKUP_NAME)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("table.values td")).to_have_count(10)
        page.get_by_text("This call for the shell").click()
        expect(page.locator(".snippets pre")).to_contain_text("/v2/models/" + quote(MARKUP_NAME, safe=""))
        page.locator(".snippets").get_by_role("button", name="Python").click()
        expect(page.locator(".snippets pre")).to_contain_text(f'client.infer("{MARKUP_NAME}", inputs')
        assert _post(server, f"/v2/models/{quote(MARKUP_NAME)}/infer", _dense(9)).status_code == 400
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("table.failures tbody tr", has_text=MARKUP_NAME).first).to_be_visible()
        page.get_by_role("link", name="Traces").click()
        expect(page.locator("main h1")).to_have_text("Traces")
        expect(page.locator("main img")).to_have_count(0)
        assert page.evaluate("window.hit") is None


@pytest.mark.slow
def test_what_takes_bodies_is_tried_by_its_path(server: ServedInThread, open_page: OpenPage) -> None:
    """A handler gets JSON and its answer is shown."""
    with open_page(_url(server, "services/handler")) as page:
        page.get_by_label("Body, JSON").fill("[20, 22]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".result pre")).to_have_text("42")
        expect(page.locator(".facts-list")).to_contain_text("threads of its own")


@pytest.mark.slow
def test_the_layers_of_a_model_are_timed_on_request(server: ServedInThread, open_page: OpenPage) -> None:
    """Those that take most come first."""
    with open_page(_url(server, "services/classifier")) as page:
        page.get_by_role("button", name="Time its layers").click()
        expect(page.locator("table.layers tbody tr").first).to_contain_text("%")


@pytest.mark.slow
def test_sequences_are_shown_with_their_age(server: ServedInThread, open_page: OpenPage) -> None:
    """And how many requests each had."""
    with open_page(_url(server, "services/totals")) as page:
        _calls(server, 2)
        row = page.locator(".sequences tbody tr")
        expect(row.locator("td").first).to_have_text("7")


def test_failures_are_told_with_their_node_and_charts_move(server: ServedInThread, open_page: OpenPage) -> None:
    """What failed comes by itself."""
    with open_page(_url(server, "activity"), may_fail=True, viewport={"width": 1280, "height": 760}) as page:
        for _ in range(3):
            _calls(server, 3)
        failed = page.locator("table.failures tbody tr", has_text="please fail").first
        expect(failed).to_contain_text("words")
        page.get_by_role("button", name="Reload").click()
        expect(page.locator("#notice")).to_contain_text("path does not exist")
        _picture(page, "activity")


def test_what_was_told_is_kept_when_a_second_was_missed(server: ServedInThread, open_page: OpenPage) -> None:
    """The figures come as a whole then, without what has not changed; names of services are no members of objects."""
    row = {"name": "__proto__", "kind": "model", "takes": [], "state": "ready", "reason": "", "versions": []}
    totals: dict[str, Any] = {
        "at": 1,
        "rate": 0,
        "error_rate": 0,
        "p50": None,
        "p90": None,
        "p99": None,
        "in_flight": 0,
        "cpu": None,
    }
    totals |= {"memory_bytes": 1, "ready": True, "reason": ""}
    failed: dict[str, Any] = {
        "number": 1,
        "at": 1,
        "name": "__proto__",
        "version": "",
        "kind": "model",
        "api": "KServe",
    }
    failed |= {"interface": "REST", "method": "ModelInfer", "request_id": "", "caller": "", "code": "ModelFailure"}
    failed |= {"node": "", "message": "it is broken", "milliseconds": 1}
    events = [
        ("whole", {"number": 1, "rows": {}, "services": {}, "totals": totals, "history": []}),
        ("failures", [failed]),
        ("whole", {"number": 3, "rows": {}, "services": {}, "totals": totals, "history": []}),
        ("frame", {"number": 4, "totals": totals, "rows": {"__proto__": row}, "services": {"__proto__": {"rate": 7}}}),
    ]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    with open_page(_url(server, "traces"), may_fail=True) as page:
        page.route("**/console/api/live*", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("table.failures tbody tr")).to_contain_text("it is broken")
        page.get_by_role("link", name="Services").click()
        expect(page.locator("tr[data-name=__proto__] td[data-title='Req/s']")).to_have_text("7.0")


def test_traces_are_drawn_as_waterfalls(server: ServedInThread, open_page: OpenPage) -> None:
    """Recorded while somebody looks."""
    with open_page(_url(server, "traces"), viewport={"width": 1280, "height": 620}) as page:
        expect(page.locator(".link")).to_have_text("not ready")
        _calls(server, 2)
        page.locator("table.traces button.span").first.click()
        expect(page.locator("table.waterfall tbody tr").first).to_be_visible()
        _picture(page, "traces")


def test_the_log_comes_as_it_is_written(server: ServedInThread, open_page: OpenPage) -> None:
    """From a level on, and with the words that are looked for; markup in it stays text."""
    with open_page(_url(server, "log")) as page:
        expect(page.locator(".link")).to_have_text("not ready")
        log = logging.getLogger("shop.prices")
        log.error("odd name %s", MARKUP)
        log.error("another line")
        expect(page.locator(".log")).to_contain_text("<script>window.hit=1</script>")
        page.get_by_label("Words").fill("another")
        expect(page.locator(".log .line")).to_have_count(1)
        assert page.evaluate("window.hit") is None
        expect(page.locator(".log img, .log script")).to_have_count(0)


def test_levels_of_the_log_are_changed_and_stay_what_they_are(
    server: ServedInThread, open_page: OpenPage, tmp_path: Path
) -> None:
    """Of the whole and of parts; a level that there is not is told, and stays to be mended."""
    configure_logs(level="INFO", fmt="json", path=tmp_path / "server.log")
    try:
        with open_page(_url(server, "log"), may_fail=True) as page:
            whole, parts = page.get_by_label("The server logs from level"), page.get_by_label("Levels of parts")
            expect(whole).to_have_value("INFO")
            whole.select_option("WARNING")
            expect(page.locator("#notice")).to_contain_text("logs from WARNING on")
            parts.fill("ovmstrio.graphs=loud")
            parts.press("Enter")
            expect(page.locator("#notice")).to_contain_text("expected one of TRACE")
            expect(parts).to_have_value("ovmstrio.graphs=loud")
            parts.fill("ovmstrio.graphs=debug")
            parts.press("Enter")
            expect(page.locator("#notice")).to_contain_text("levels of their own: ovmstrio.graphs=debug")
            expect(whole).to_have_value("WARNING")
            page.reload()
            expect(parts).to_have_value("ovmstrio.graphs=debug")
            expect(whole).to_have_value("WARNING")
    finally:
        LOG_LEVEL.set_parts({})


def test_a_log_that_is_paused_keeps_its_lines_and_gets_no_others(server: ServedInThread, open_page: OpenPage) -> None:
    """Whatever else changes, and whatever is looked for."""
    log = logging.getLogger("shop.prices")
    with open_page(_url(server, "log")) as page:
        log.error("price one")
        lines = page.locator(".log .line", has_text="price ")
        expect(lines).to_have_count(1)
        page.get_by_role("button", name="Pause").click()
        log.error("price two")
        page.get_by_label("Words").fill("price")
        expect(lines).to_have_count(1)
        page.get_by_role("button", name="Pause").click()
        expect(lines).to_have_count(2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "view", ["services", "services/detector", "services/words", "services/classifier", "activity", "traces", "log"]
)
def test_no_view_is_wider_than_a_phone(server: ServedInThread, open_page: OpenPage, view: str, scheme: str) -> None:
    """390 points of width are enough, in both schemes, whose colours differ."""
    size = {"width": 390, "height": 800}
    with open_page(_url(server, view), viewport=size, color_scheme=scheme) as page:
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator(".facts b").first).to_have_text(re.compile("[0-9]"))
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 22, 26)") == (scheme == "dark")
        if view == "services/words":
            _picture(page, f"phone_{scheme}")


def test_the_page_is_used_by_keyboard_and_has_names_for_screen_readers(
    server: ServedInThread, open_page: OpenPage
) -> None:
    """The skip link comes first; views, fields and sorted columns say what they are."""
    with open_page(_url(server)) as page:
        expect(page.locator("tr[data-name=dag]")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("navigation").get_by_role("link", name="Services")).to_be_focused()
        expect(page.get_by_role("navigation").get_by_role("link", name="Services")).to_have_attribute(
            "aria-current", "page"
        )
        page.get_by_role("button", name="Req/s").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("columnheader", name="Req/s")).to_have_attribute("aria-sort", "descending")
        page.get_by_role("link", name="dag").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1, name="dag")).to_be_visible()
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, select, textarea, button')].filter((each) => "
            "!(each.labels?.length || each.ariaLabel || each.textContent.trim())).length"
        )
        assert unnamed == 0


@pytest.mark.slow
def test_a_page_goes_on_when_its_server_was_started_again(tmp_path: Path, open_page: OpenPage) -> None:
    """It says that it is cut off, and then shows what the new server has."""
    config = write_services(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    opened = ExitStack()
    with serving_in_thread(address, config_path=config) as server:
        page = opened.enter_context(open_page(_url(server), may_fail=True))
        expect(page.locator("tr[data-name=dag]")).to_be_visible()
    expect(page.locator(".link")).to_have_text("reconnecting")
    with serving_in_thread(address, config_path=config) as server:
        expect(page.locator(".link")).to_have_text("not ready")
        assert _post(server, "/v2/models/dag/infer", _dense()).status_code == 200
        expect(page.locator("tr[data-name=dag] td[data-title=Requests]")).to_have_text("1")
    opened.close()


@pytest.mark.slow
def test_a_server_that_knows_its_callers_asks_for_a_key(tmp_path: Path, open_page: OpenPage) -> None:
    """A wrong one is refused, the right one opens the list, with what it may do; one that is gone ends what is open."""
    config = write_services(tmp_path)
    keys = tmp_path / "keys.json"
    entry = {"name": "reader", "sha256": digest_of("secret-key"), "scopes": ["read"]}
    maker = {"name": "maker", "sha256": digest_of("maker-key"), "scopes": ["infer:*"]}
    keys.write_text(json.dumps({"callers": [entry, maker]}))
    with (
        serving_in_thread(config_path=config, keys_file=keys, console_bodies=100) as server,
        open_page(_url(server), may_fail=True) as page,
    ):
        field = page.get_by_label("Key or token with the scope read")
        field.fill("a-wrong-key")
        page.get_by_role("button", name="Go on").click()
        field.fill("secret-key")
        page.get_by_role("button", name="Go on").click()
        expect(page.locator("tr[data-name=dag]")).to_be_visible()
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("figure.chart").first).to_be_visible()
        expect(page.get_by_role("button", name="Reload")).to_have_count(0)
        refused = server.ask("POST", "/v2/models/dag/infer", json={}, headers={"x-api-key": "maker-key"})
        assert refused.status_code == 400
        expect(page.locator("table.failures")).to_contain_text("InvalidRequest")
        expect(page.get_by_text("What was sent")).to_have_count(0)
        keys.write_text(json.dumps({"callers": [entry | {"sha256": digest_of("another-key")}]}))
        expect(field).to_be_visible(timeout=60_000)


@pytest.mark.slow
def test_a_thousand_services_are_listed_filtered_and_live(tmp_path: Path, open_page: OpenPage) -> None:
    """The first of them are drawn, all can be found, and a call shows."""
    (tmp_path / "graph.pbtxt").write_text(
        'input_stream: "in"\noutput_stream: "out"\n'
        'node { calculator: "PassThroughCalculator" input_stream: "in" output_stream: "out" }\n'
    )
    entries = [{"name": f"graph_{number:04}", "base_path": str(tmp_path)} for number in range(1000)]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries}))
    with serving_in_thread(config_path=config) as server, open_page(_url(server)) as page:
        expect(page.locator(".bar .quiet")).to_contain_text("1000 of 1000 ready; the first 200 of 1000 are shown")
        page.get_by_role("searchbox").fill("0999")
        expect(page.locator("tbody tr")).to_have_count(1)
        given = {"inputs": [{"name": "in", "shape": [1], "datatype": "FP32", "data": [1]}]}
        assert _post(server, "/v2/models/graph_0999/infer", given).status_code == 200
        expect(page.locator("tr[data-name=graph_0999] td[data-title=Requests]")).to_have_text("1")


@pytest.mark.slow
def test_a_chat_tells_of_an_answer_without_a_word(tmp_path: Path, open_page: OpenPage) -> None:
    """A text may end with its first token."""
    folder = write_tiny_folder(tmp_path / "tiny")
    event = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    with (
        serving_in_thread(model_name="tiny", model_path=folder, task="text_generation") as server,
        open_page(_url(server, "services/tiny")) as page,
    ):
        events = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        page.route("**/v3/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=events))
        page.get_by_label("Message").fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".said.assistant")).to_have_text("ended without a word (stop)")


@pytest.mark.slow
def test_a_model_of_text_has_a_chat_and_tells_of_its_batch(tmp_path: Path, open_page: OpenPage) -> None:
    """The answer grows, the tokens are counted, and the call stands there for OpenAI's client."""
    folder = write_tiny_folder(tmp_path / "tiny")
    with (
        serving_in_thread(model_name="tiny", model_path=folder, task="text_generation") as server,
        open_page(_url(server, "services/tiny")) as page,
    ):
        page.get_by_label("Tokens at most").fill("8")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message").fill("Hello <b>you</b>")
        page.keyboard.press("Enter")
        expect(page.locator(".said.user")).to_have_text("Hello <b>you</b>")
        expect(page.locator(".said.assistant")).to_have_text(re.compile("."))
        made = page.locator(".facts-list div", has_text="tokens made").locator("dd")
        expect(made).to_have_text(re.compile("[1-9]"))
        page.get_by_text("This call for the shell").click()
        page.locator(".snippets").get_by_role("button", name="Python").click()
        expect(page.locator(".snippets pre")).to_contain_text("from openai import OpenAI")
