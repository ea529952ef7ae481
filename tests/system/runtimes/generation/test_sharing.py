"""Engines shared by services."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.generation.sharing.choosing_engine import engine_of

SECONDS = 600


class _NotesKeys:
    """Notes the keys that engines are shown by."""

    row, rows = 0, 1

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.refused: list[tuple[str, ServerError]] = []

    def owner(self, _: str) -> None:
        return None

    def shown(self, key: str, _: Any) -> nullcontext[None]:
        self.keys.append(key)
        return nullcontext()

    def refuse(self, key: str, error: ServerError) -> None:
        self.refused.append((key, error))


async def test_an_engine_is_known_by_what_it_is_loaded_with_and_its_failure_is_told() -> None:
    """Limits that change without a load leave it what it is for a process that is started anew."""
    sharing = _NotesKeys()
    spec = TextModelSpec(name="m", base_path=Path("/m"), path=Path("/m"))
    for each in (spec, spec.model_copy(update={"max_concurrency": 3}), spec.model_copy(update={"device": "GPU"})):
        engine = engine_of(
            cast("Any", sharing), each, {}, lambda _: None, lambda _: None, program="ovmstrio.no_such_program"
        )
        with trio.fail_after(SECONDS), pytest.raises(BaseExceptionGroup):
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
    first, second, third = sharing.keys
    assert first == second != third
    assert [key for key, _ in sharing.refused] == sharing.keys
