from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.wire.grpc import TransportLimits


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrent_streams": 0},
        {"max_receive_message_bytes": -1},
        {"stream_window_bytes": 65_534},
        {"connection_window_bytes": 2**31},
        {"keepalive_idle_seconds": -1.0},
        {"handshake_seconds": float("nan")},
    ],
)
def test_impossible_limits_are_refused_by_name(bad: dict[str, Any]) -> None:
    """The error names the limit, what was expected and what came."""
    (name,) = bad
    with pytest.raises(ValueError, match=f"^{name}: expected at"):
        TransportLimits(**bad)


def test_limits_allow_a_thousand_calls_and_64_mib() -> None:
    """The defaults are those that the server promises."""
    limits = TransportLimits()
    assert limits.max_concurrent_streams >= 1_000
    assert limits.max_receive_message_bytes == 64 * 1024 * 1024
