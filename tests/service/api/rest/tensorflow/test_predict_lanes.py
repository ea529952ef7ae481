"""Predict calls on the short way: the application's answers, and nothing that the application would read otherwise."""

from __future__ import annotations

import pytest

from ovmstrio.core.http import HttpAnswer
from ovmstrio.observability.metrics import Metrics
from ovmstrio.server.rest_front_end import make_router
from tests.unit.api.rest.servers import Serving, infer_post

BODY = b'{"inputs": {"x": [[0.5, -1]]}}'
GOOD = 6

CALLS: dict[str, tuple[str, bytes]] = {
    "a name": ("echo", BODY),
    "a version": ("echo/versions/1", BODY),
    "the default version": ("echo/versions/0", BODY),
    "an encoded name": ("ec%68o", BODY),
    "rows": ("echo", b'{"instances": [{"x": 1}, {"x": NaN}]}'),
    "a label": ("echo/labels/stable", BODY),
    "an unknown name": ("nobody", BODY),
    "a name with colons": ("echo:predict", BODY),
    "an unknown version": ("echo/versions/9", BODY),
    "a huge version": ("echo/versions/9999999999999999999", BODY),
    "a longer version": ("echo/versions/99999999999999999999", BODY),
    "a version that is none": ("echo/versions/one", BODY),
    "no JSON": ("echo", b"{"),
    "no body": ("echo", b""),
    "another document": ("echo", b"{}"),
    "no single input": ("echo", b'{"inputs": [1]}'),
    "what the servable cannot read": ("echo", b'{"inputs": {"nothing": []}}'),
    "dots": ("..", BODY),
    "an encoded slash": ("echo%2Fversions", BODY),
    "no UTF-8": ("%ff", BODY),
}


def _post(path: str, body: bytes, *, chunked: bool = False) -> bytes:
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/models/{path}:predict HTTP/1.1\r\nHost: h\r\n{size}\r\n\r\n".encode()
    if chunked:
        return head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
    return head + body


@pytest.mark.parametrize("case", CALLS)
async def test_both_lanes_answer_alike(serving: Serving, case: str) -> None:
    """Status, type and body are the same, byte for byte."""
    path, body = CALLS[case]
    answers = []
    for chunked in (False, True):
        async with serving.connect() as peer:
            answers.append(await peer.ask(_post(path, body, chunked=chunked)))
    fast, application = answers
    assert (fast.status, fast.body) == (application.status, application.body)
    assert fast.headers["content-type"] == application.headers["content-type"] == "application/json"
    assert (fast.status == 200) is (case in {*list(CALLS)[:GOOD], "what the servable cannot read"})


def _is_hot(serving: Serving, method: str, target: str) -> bool:
    found = make_router(serving.plane).find(method, target)
    return not isinstance(found, HttpAnswer) and found.is_hot


async def test_the_lane_takes_plain_predict_calls(serving: Serving) -> None:
    """Name and version are those of the head."""
    found = make_router(serving.plane).find("POST", "/v1/models/a%20b:c/versions/7:predict")
    assert not isinstance(found, HttpAnswer)
    assert found.places == {"model": "a b:c", "version": "7"}
    assert found.is_hot


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v2/models/m:predict"),
        ("POST", "/v4/models/m:predict"),
        ("POST", "/v1/models/m/infer"),
        ("POST", "/v1/models/m:classify"),
        ("POST", "/v1/models/m:predict/"),
        ("POST", "/v1/models/m/labels/a:predict"),
        ("POST", "/v1/models/m/versions/x:predict"),
    ],
)
async def test_other_targets_are_not_for_the_lane(serving: Serving, method: str, target: str) -> None:
    """The application judges them."""
    assert _is_hot(serving, "POST", "/v1/models/m:predict")
    assert not _is_hot(serving, method, target)


async def test_both_apis_share_a_connection(serving: Serving) -> None:
    """Requests that come at once are answered in their order."""
    async with serving.connect() as peer:
        await peer.send(_post("echo", BODY) + infer_post() + _post("echo", BODY))
        first, second, third = [await peer.answer() for _ in range(3)]
    assert first.json == third.json == {"outputs": [[0.5, -1]]}
    assert second.json["outputs"][0]["data"] == [0.5, -1]


async def test_a_failure_that_nobody_foresaw_ends_one_request(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told without its reason, which is in the log."""

    async def fail(request: object) -> None:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(serving.servable, "infer", fail)
        async with serving.connect() as peer:
            answer = await peer.ask(_post("echo", BODY))
            patch.undo()
            again = await peer.ask(_post("echo", BODY))
    assert answer.status == 500
    assert answer.json == {"error": "internal error; the server's log has the details"}
    assert again.status == 200


def test_metrics_exist_before_the_first_call() -> None:
    """Dashboards see zeros, not gaps."""
    metrics = Metrics()
    metrics.servable("m", "1")
    labels = 'api="TensorFlowServing",interface="REST",method="Predict",name="m",version="1"'
    assert f"ovms_requests_success{{{labels}}} 0.0\n".encode() in metrics.render()
