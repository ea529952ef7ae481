from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image

from ovmstrio.auth.key_file import key_hash
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.logs import configure_logs
from tests.support.console_services import MARKUP, MARKUP_NAME, write_services
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.tiny_llm import write_tiny_folder
from tests.support.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.system.console.conftest import OpenPage

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=60_000)

PICTURES: Final = os.environ.get("CONSOLE_PICTURES", "")
"""The folder that gets the pictures of the documentation; none are made without."""
_COLOURS: Final = 160
_PICTURED: Final = {"services", "words", "try", "activity", "phone_dark"}


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
    _post(
        server,
        "/v2/models/words/infer",
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["please fail"]}]},
    )


def test_the_list_has_states_reasons_and_live_counts(server: ServedInThread, open_page: OpenPage) -> None:
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
def test_graphs_are_drawn_with_live_counts(server: ServedInThread, open_page: OpenPage, name: str, nodes: int) -> None:
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


def test_a_picture_is_sent_to_a_model_and_its_answer_shown(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/classifier"), viewport={"width": 1280, "height": 700}) as page:
        expect(page.locator(".facts-list")).to_contain_text("precision")
        page.locator("input[type=file]").set_input_files({"name": "red.png", "mimeType": "image/png", "buffer": _png()})
        expect(page.locator(".input")).to_contain_text("red.png: FP32 [1, 3, 32, 32]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".output")).to_contain_text("FP32 [1, 10]")
        page.get_by_role("button", name="table").click()
        expect(page.locator("table.values td")).to_have_count(10)
        page.get_by_text("Call from the shell").click()
        expect(page.locator(".snippets pre")).to_contain_text("/v2/models/classifier/infer")
        page.locator(".snippets").get_by_role("button", name="Python").click()
        expect(page.locator(".snippets pre")).to_contain_text("tritonclient")
        _picture(page, "try")


def _png() -> bytes:
    written = BytesIO()
    Image.fromarray(np.full((8, 8, 3), (255, 20, 20), np.uint8)).save(written, "PNG")
    return written.getvalue()


@pytest.mark.slow
def test_an_array_is_sent_and_errors_of_the_server_are_shown(server: ServedInThread, open_page: OpenPage) -> None:
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
        expect(page.get_by_role("alert")).to_contain_text("expected numbers only")


def _send(page: Page, text: str, datatype: str = "") -> None:
    page.get_by_label("first_number", exact=True).fill(text)
    page.get_by_label("Type of first_number").select_option(datatype)
    page.get_by_role("button", name="Send").click()


@pytest.mark.parametrize(
    ("text", "datatype", "sent", "cells"),
    [
        ("3", "", "INT64 [1]", ["6"]),
        ("1 2 3", "", "INT64 [3]", ["4", "5", "6"]),
        ("[[1, 2], [3, 4]]", "", "INT64 [2, 2]", ["4", "5", "6", "7"]),
        ("1.5", "", "FP64 [1]", ["4.5"]),
        ("-1", "FP32", "FP32 [1]", ["2"]),
        ("250", "UINT8", "UINT8 [1]", ["253"]),
    ],
)
def test_a_graph_gets_numbers_of_the_type_of_their_text(
    server: ServedInThread, open_page: OpenPage, text: str, datatype: str, sent: str, cells: list[str]
) -> None:
    with open_page(_url(server, "services/incrementer")) as page:
        _send(page, text, datatype)
        expect(page.locator("div.output")).to_contain_text(sent)
        expect(page.locator("table.values td")).to_have_text(cells)
        page.get_by_label("How", exact=True).select_option("stream")
        if datatype in {"", "FP32"}:
            page.get_by_role("button", name="Send").click()
            expected = f"[{','.join(cells)}]" if len(cells) > 1 else cells[0]
            expect(page.locator("pre.stream .piece")).to_have_text([expected])


@pytest.mark.parametrize(
    ("text", "datatype", "problem"),
    [
        ("[[1, 2], [3]]", "", "all rows of an array must have the same length"),
        ("[1, x]", "", "the list is not valid JSON"),
        ('[1, "one"]', "", "expected an array of numbers, of true and false, or of texts only"),
        ("1 256", "UINT8", "expected UINT8 from 0 to 255, got 256 at position 2"),
        ("1.5", "INT64", "expected whole numbers for INT64, got 1.5"),
        ("yes", "BOOL", 'expected true or false, got "yes"'),
    ],
)
def test_a_wrong_value_is_reported_at_its_field(
    server: ServedInThread, open_page: OpenPage, text: str, datatype: str, problem: str
) -> None:
    with open_page(_url(server, "services/incrementer")) as page:
        _send(page, text, datatype)
        field = page.get_by_label("first_number", exact=True)
        expect(page.locator(".input").get_by_role("alert")).to_contain_text(problem)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_be_focused()
        expect(page.locator(".result")).to_be_empty()
        _send(page, "1")
        expect(page.locator("table.values td")).to_have_text(["4"])
        expect(page.get_by_role("alert")).to_have_count(0)


def test_the_command_below_the_form_sends_the_same_values(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/incrementer")) as page:
        _send(page, "[[1, 2], [3, 4]]")
        page.get_by_text("Call from the shell").first.click()
        snippets = page.locator(".snippets").first
        snippets.get_by_role("button", name="ovms").click()
        expect(snippets.locator("pre")).to_contain_text(
            "echo '[[1,2],[3,4]]' | ovms infer --model 'incrementer' --input - --rest"
        )


def test_a_stream_is_shown_in_its_pieces(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/words")) as page:
        page.get_by_label("text", exact=True).fill("one two three")
        page.get_by_label("How", exact=True).select_option("stream")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("Pieces of upper").locator(".piece")).to_have_text(["ONE ", "TWO ", "THREE "])
        expect(page.locator(".result").first).to_contain_text(re.compile("6 pieces in [0-9.]+ (ms|s), complete"))


def test_the_shape_follows_the_values_of_a_model_with_a_fixed_shape(
    server: ServedInThread, open_page: OpenPage
) -> None:
    with open_page(_url(server, "services/model")) as page:
        values = page.get_by_label("b", exact=True)
        values.fill("1 2 3")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".input").get_by_role("alert")).to_contain_text("expected [1, 10], got 3 values")
        values.fill("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("table.values td").last).to_have_text("11")


def test_markup_in_a_stream_is_shown_as_text(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/words")) as page:
        page.locator(".input textarea").fill(f"one {MARKUP} three")
        page.get_by_label("How", exact=True).select_option("stream")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("pre.stream", has_text="THREE")).to_contain_text("<SCRIPT>")
        expect(page.locator("main img, main script")).to_have_count(0)
        assert page.evaluate("window.hit") is None


def test_markup_in_a_name_is_shown_as_text_in_every_view(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server), may_fail=True) as page:
        page.get_by_role("searchbox").fill("onerror")
        page.get_by_role("link", name=MARKUP_NAME).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(MARKUP_NAME)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("table.values td")).to_have_count(10)
        page.get_by_text("Call from the shell").click()
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
def test_a_service_is_shown_with_the_features_of_its_kind(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/handler")) as page:
        page.get_by_label("Body, JSON").fill("[20, 22]")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".result pre")).to_have_text("42")
        expect(page.locator(".facts-list")).to_contain_text("dedicated threads")
    with open_page(_url(server, "services/classifier")) as page:
        page.get_by_role("button", name="Time layers").click()
        expect(page.locator("table.layers tbody tr").first).to_contain_text("%")
    with open_page(_url(server, "services/totals")) as page:
        _calls(server, 2)
        expect(page.locator(".sequences tbody tr").locator("td").first).to_have_text("7")


def test_failures_are_shown_with_their_node(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "activity"), may_fail=True, viewport={"width": 1280, "height": 760}) as page:
        for _ in range(3):
            _calls(server, 3)
        failed = page.locator("table.failures tbody tr", has_text="please fail").first
        expect(failed).to_contain_text("words")
        expect(page.locator("table.failures tbody tr", has_text="detector")).to_have_count(1)
        failed.get_by_role("button", name="GraphFailure").click()
        calls = page.locator("table.failures tr.calls li")
        expect(calls.first).to_contain_text("ValueError: the text asks for it: please fail (words.py:10)")
        expect(failed.locator("td.number").first).to_have_text(re.compile("^[1-9][0-9]*$"))
        page.get_by_role("button", name="Reload").click()
        expect(page.locator("#notice")).to_contain_text("path does not exist")
        _picture(page, "activity")


def test_failures_stay_when_a_frame_was_missed(server: ServedInThread, open_page: OpenPage) -> None:
    row = {"name": "__proto__", "kind": "model", "takes": [], "state": "ready", "reason": "", "versions": []}
    totals = {"at": 1, "rate": 0, "error_rate": 0, "in_flight": 0, "memory_bytes": 1, "ready": True, "reason": ""}
    totals |= dict.fromkeys(("p50", "p90", "p99", "cpu"))
    failed = {"number": 1, "at": 1, "milliseconds": 1, "name": "__proto__", "kind": "model", "message": "it is broken"}
    failed |= {"api": "KServe", "interface": "REST", "method": "ModelInfer", "code": "ModelFailure"}
    failed |= dict.fromkeys(("version", "request_id", "caller", "node"), "")
    group = {key: failed[key] for key in ("name", "kind", "code", "node", "message")}
    group |= {"count": 1, "first": 1, "last": 1}
    full = {"rows": {}, "services": {}, "totals": totals}
    events = [
        ("whole", {"number": 1, **full}),
        ("failures", [failed]),
        ("failure_groups", [group]),
        # After a missed frame all figures are sent, but no failures.
        ("whole", {"number": 3, **full}),
        ("frame", {"number": 4, "totals": totals, "rows": {"__proto__": row}, "services": {"__proto__": {"rate": 7}}}),
    ]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    with open_page(_url(server, "traces"), may_fail=True) as page:
        page.route("**/console/api/live*", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("table.failures tbody tr")).to_contain_text("it is broken")
        page.get_by_role("link", name="Services").click()
        expect(page.locator("tr[data-name=__proto__] td[data-title='Req/s']")).to_have_text("7.0")


def test_charts_show_the_time_before_the_page_was_opened(server: ServedInThread, open_page: OpenPage) -> None:
    _calls(server, 2)
    until(lambda: any(server.ask("GET", "/console/api/services/detector/series").json()["series"].get("rate", ())))
    with open_page(_url(server, "services/detector")) as page:
        lines = page.locator("figure.chart", has_text="Requests/s").locator("path.line.one")
        # The page itself has seen no request.
        expect(lines).to_have_attribute("d", re.compile("L[0-9.]+ (?!87.0)"))


def test_charts_show_the_values_of_the_time_under_the_pointer(server: ServedInThread, open_page: OpenPage) -> None:
    end = int(time.time()) // 5 * 5
    rates = [float(number) for number in range(720)]
    names = ("error_rate", "p50", "p90", "p99", "in_flight", "cpu", "memory_bytes")
    series = {"rate": rates, **{name: [None] * 720 for name in names}}
    document = {"seconds": 5, "end": end, "series": series}
    with open_page(_url(server, "log")) as page:
        page.route("**/console/api/series", lambda route: route.fulfill(json=document))
        page.get_by_role("link", name="Activity").click()
        page.get_by_role("button", name="1 h").click()
        chart = page.locator("figure.chart", has_text="Requests/s")
        plot = chart.get_by_role("slider")
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        value = chart.locator("figcaption b")
        # The middle of the hour; a point is five seconds, and the page is some seconds old.
        expect(value).to_have_text(re.compile("^3[567][0-9]$"))
        middle = int(value.inner_text())
        expect(plot).to_have_attribute("aria-valuetext", re.compile(rf"^[0-9:]{{8}}: {middle}$"))
        plot.focus()
        page.keyboard.press("ArrowLeft")
        expect(value).to_have_text(re.compile("^3[3456][0-9]$"))
        page.keyboard.press("Home")
        expect(value).to_have_text(re.compile("^([0-9]|1[0-9])\\.?[0-9]?$"))
        # A part of the hour is zoomed in by the mouse, and left by a double-click.
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        page.mouse.up()
        shown = page.locator(".range .mono")
        expect(shown).to_have_text(re.compile("^[0-9:]{8} . [0-9:]{8}$"))
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
        expect(value).to_have_text(re.compile("^3[3567][0-9]$"))
        plot.dblclick()
        expect(shown).to_be_empty()


def test_traces_are_filtered_by_service_and_duration(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "traces")) as page:
        expect(page.locator(".link")).to_have_text("not ready")
        if page.locator("table.traces tbody tr").count() == 0:
            expect(page.get_by_text("No call has ended since this view was opened")).to_be_visible()
        _calls(server, 2)
        rows = page.locator("table.traces tbody tr")
        expect(rows.filter(has_text="handler").first).to_be_visible()
        page.get_by_label("Service", exact=True).select_option("detector")
        expect(rows.filter(has_not_text="detector")).to_have_count(0)
        expect(rows.first).to_contain_text("ModelInfer detector")
        page.get_by_label("Minimum duration in milliseconds").fill("60000")
        expect(rows).to_have_count(0)
        expect(page.locator("main")).to_contain_text(
            re.compile("None of the [0-9]+ recorded calls is one of the service detector of at least 60000 ms")
        )
        page.get_by_role("button", name="Show all").click()
        expect(rows.filter(has_text="handler").first).to_be_visible()
        times = rows.locator("button").all_inner_texts()
        assert times == sorted(times, key=lambda each: each[:8], reverse=True)


def test_an_empty_view_says_why(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/dag")) as page:
        expect(page.locator("figure.chart", has_text="Latency")).to_contain_text("no requests in this time")
    with open_page(_url(server)) as page:
        page.get_by_role("searchbox").fill("unicorn")
        expect(page.get_by_text("No service has a name, kind or state with “unicorn”.")).to_be_visible()
        page.get_by_role("link", name="Log").click()
        expect(page.locator(".log .line").first).to_be_visible()
        page.get_by_label("Words").fill("unicorn")
        expect(page.get_by_text(re.compile("None of the [0-9]+ kept lines? has the words “unicorn”."))).to_be_visible()


@pytest.mark.slow
def test_memory_is_shown_of_services_with_processes(tmp_path: Path, open_page: OpenPage) -> None:
    config = write_services(tmp_path)
    with serving_in_thread(config_path=config, python_isolation="process") as server, open_page(_url(server)) as page:
        memory = page.locator("tr[data-name=words] td[data-title=Memory]")
        expect(memory).to_have_text(re.compile("^[0-9.]+ MB$"))
        assert float(memory.inner_text().split()[0]) > 10
        expect(page.locator("tr[data-name=broken] td[data-title=Memory]")).to_have_text("")


def test_traces_are_drawn_as_waterfalls(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "traces"), viewport={"width": 1280, "height": 620}) as page:
        expect(page.locator(".link")).to_have_text("not ready")
        _calls(server, 2)
        page.locator("table.traces button.span").first.click()
        expect(page.locator("table.waterfall tbody tr").first).to_be_visible()
        _picture(page, "traces")


def test_lines_of_the_log_are_shown_filtered_and_as_text(server: ServedInThread, open_page: OpenPage) -> None:
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


def test_levels_of_the_log_are_changed_and_kept(server: ServedInThread, open_page: OpenPage, tmp_path: Path) -> None:
    configure_logs(level="INFO", fmt="json", path=tmp_path / "server.log")
    try:
        with open_page(_url(server, "log"), may_fail=True) as page:
            level, parts = page.get_by_label("Server log level"), page.get_by_label("Logger levels")
            expect(level).to_have_value("INFO")
            level.select_option("WARNING")
            expect(page.locator("#notice")).to_contain_text("log level: WARNING")
            parts.fill("ovmstrio.graphs=loud")
            parts.press("Enter")
            expect(page.locator("#notice")).to_contain_text("expected one of TRACE")
            expect(parts).to_have_value("ovmstrio.graphs=loud")
            parts.fill("ovmstrio.graphs=debug")
            parts.press("Enter")
            expect(page.locator("#notice")).to_contain_text("Logger levels: ovmstrio.graphs=debug")
            expect(level).to_have_value("WARNING")
            page.reload()
            expect(parts).to_have_value("ovmstrio.graphs=debug")
            expect(level).to_have_value("WARNING")
    finally:
        LOG_LEVEL.set_logger_levels({})


def test_a_paused_log_keeps_its_lines(server: ServedInThread, open_page: OpenPage) -> None:
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


def test_a_wide_graph_scrolls_on_a_phone(server: ServedInThread, open_page: OpenPage) -> None:
    with open_page(_url(server, "services/detector"), viewport={"width": 280, "height": 640}, has_touch=True) as page:
        expect(page.locator("svg.drawing .box.node")).to_have_count(4)
        canvas = page.locator(".canvas")
        wide, narrow = canvas.evaluate("each => [each.scrollWidth, each.clientWidth]")
        assert wide > narrow
        right = page.locator("svg.drawing .box.output").last
        canvas.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
        right.scroll_into_view_if_needed()
        expect(right).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 280


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "view", ["services", "services/detector", "services/words", "services/classifier", "activity", "traces", "log"]
)
def test_no_view_is_wider_than_a_phone(server: ServedInThread, open_page: OpenPage, view: str, scheme: str) -> None:
    size = {"width": 390, "height": 800}
    with open_page(_url(server, view), viewport=size, color_scheme=scheme) as page:
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator(".facts b").first).to_have_text(re.compile("[0-9]"))
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 22, 26)") == (scheme == "dark")
        if view == "services/words":
            _picture(page, f"phone_{scheme}")


def test_the_page_is_usable_by_keyboard_and_screen_readers(server: ServedInThread, open_page: OpenPage) -> None:
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
def test_the_page_reconnects_to_a_restarted_server(tmp_path: Path, open_page: OpenPage) -> None:
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
def test_a_server_with_known_callers_asks_for_a_key(tmp_path: Path, open_page: OpenPage) -> None:
    config = write_services(tmp_path)
    keys = tmp_path / "keys.json"
    entry = {"name": "reader", "sha256": key_hash("secret-key"), "scopes": ["read"]}
    maker = {"name": "maker", "sha256": key_hash("maker-key"), "scopes": ["infer:*"]}
    keys.write_text(json.dumps({"callers": [entry, maker]}))
    with (
        serving_in_thread(config_path=config, keys_file=keys, console_body_bytes=100) as server,
        open_page(_url(server), may_fail=True) as page,
    ):
        field = page.get_by_label("Key or token with the scope read")
        field.fill("a-wrong-key")
        page.get_by_role("button", name="Sign in").click()
        field.fill("secret-key")
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("tr[data-name=dag]")).to_be_visible()
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("figure.chart").first).to_be_visible()
        expect(page.get_by_role("button", name="Reload")).to_have_count(0)
        refused = server.ask("POST", "/v2/models/dag/infer", json={}, headers={"x-api-key": "maker-key"})
        assert refused.status_code == 400
        expect(page.locator("table.failures")).to_contain_text("InvalidRequest")
        expect(page.get_by_text("Request body")).to_have_count(0)
        keys.write_text(json.dumps({"callers": [entry | {"sha256": key_hash("another-key")}]}))
        expect(field).to_be_visible(timeout=60_000)


@pytest.mark.slow
def test_a_thousand_services_are_listed_filtered_and_live(tmp_path: Path, open_page: OpenPage) -> None:
    (tmp_path / "graph.pbtxt").write_text(
        'input_stream: "in"\noutput_stream: "out"\n'
        'node { calculator: "PassThroughCalculator" input_stream: "in" output_stream: "out" }\n'
    )
    entries = [{"name": f"graph_{number:04}", "base_path": str(tmp_path)} for number in range(1000)]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries}))
    with serving_in_thread(config_path=config) as server, open_page(_url(server)) as page:
        expect(page.locator(".bar .quiet")).to_contain_text("1000 of 1000 ready; showing the first 200 of 1000")
        page.get_by_role("searchbox").fill("0999")
        expect(page.locator("tbody tr")).to_have_count(1)
        body = {"inputs": [{"name": "in", "shape": [1], "datatype": "FP32", "data": [1]}]}
        assert _post(server, "/v2/models/graph_0999/infer", body).status_code == 200
        expect(page.locator("tr[data-name=graph_0999] td[data-title=Requests]")).to_have_text("1")


@pytest.mark.slow
def test_a_chat_shows_an_empty_answer(tmp_path: Path, open_page: OpenPage) -> None:
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
        expect(page.locator(".said.assistant")).to_have_text("ended without text (stop)")


@pytest.mark.slow
def test_a_text_model_has_a_chat_with_live_counts(tmp_path: Path, open_page: OpenPage) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    with (
        serving_in_thread(model_name="tiny", model_path=folder, task="text_generation") as server,
        open_page(_url(server, "services/tiny")) as page,
    ):
        page.get_by_label("Maximum tokens").fill("8")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message").fill("Hello <b>you</b>")
        page.keyboard.press("Enter")
        expect(page.locator(".said.user")).to_have_text("Hello <b>you</b>")
        expect(page.locator(".said.assistant")).to_have_text(re.compile("."))
        made = page.locator(".facts-list div", has_text="tokens made").locator("dd")
        expect(made).to_have_text(re.compile("[1-9]"))
        page.get_by_text("Call from the shell").click()
        page.locator(".snippets").get_by_role("button", name="Python").click()
        expect(page.locator(".snippets pre")).to_contain_text("from openai import OpenAI")
