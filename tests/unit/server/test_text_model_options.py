"""A model of text that the command line describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.text_model_options import text_model


@pytest.mark.parametrize(("given", "expected"), [({}, 256), ({"max_queue": 3}, 3)])
def test_the_servers_queue_is_that_of_the_one_model(tmp_path: Path, given: dict[str, int], expected: int) -> None:
    """Where it is given; what the server has otherwise is for calls that compute at once."""
    settings = ServerSettings(model_name="chat", model_path=tmp_path, task="text_generation", **given)

    assert text_model(settings, None, "here").max_queue == expected
