"""What the server calls itself."""

from __future__ import annotations

import pytest

from ovmstrio.server.settings import ServerSettings
from tests.support.both_doors import DOORS, serving_both


@pytest.mark.parametrize("door", DOORS)
async def test_clients_are_told_the_name_that_was_chosen(door: str) -> None:
    """Some of Triton's examples insist on theirs; OVMS's is the default."""
    async with serving_both([], server_name="triton") as both:
        told = await both.with_triton(door, lambda client, _: client.get_server_metadata())

    assert (told["name"] if door == "http" else told.name) == "triton"
    assert ServerSettings().server_name == "OpenVINO Model Server"
