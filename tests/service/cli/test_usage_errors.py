"""Command lines of ``ovms serve`` that cannot be used."""

from __future__ import annotations

import sys

import pytest

from ovms_cli.main import main

ONE_MODEL = ("--model_name", "m", "--model_path", "/m")


@pytest.mark.parametrize(
    "options",
    [
        ("--no_such_option",),
        ("--port", "70000"),
        ("--model_name", "m"),
        ("--config_path", "config.json", "--model_name", "m", "--model_path", "here"),
        ("--port", "8000", "--rest_port", "8000"),
        (*ONE_MODEL, "--max_sequence_number", "3"),
        (*ONE_MODEL, "--idle_sequence_cleanup"),
        (*ONE_MODEL, "--low_latency_transformation"),
        (*ONE_MODEL, "--sequence_migration"),
        (*ONE_MODEL, "--stateful", "--max_sequence_number", str(2**32)),
        (*ONE_MODEL, "--stateful", "--batch_size", "auto"),
    ],
    ids=" ".join,
)
def test_a_usage_error_exits_with_64(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """Scripts can tell a usage error from a failure, as with OVMS."""
    monkeypatch.setattr(sys, "argv", ["ovms", "serve", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 64
