from __future__ import annotations

import pytest

from paddle_serving_client.utils import MultiThreadRunner, show_latency


def _load(number: int, resource: int) -> list[list[int]] | None:
    return [[number, resource], [number * resource]] if number != resource else None


def test_load_scripts_call_in_processes_and_show_latencies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "")
    monkeypatch.setenv("https_proxy", "")
    assert MultiThreadRunner().run(_load, 3, 2) == [[1, 2, 3, 2], [2, 6]]
    show_latency([1, 2, 6])
    assert capsys.readouterr().err.startswith("latency:\nmean: 3.0ms\nmedian: 2.0ms\n80_percent: ")
