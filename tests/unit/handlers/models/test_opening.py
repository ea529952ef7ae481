from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.runtimes.handlers.models.opening import open_models
from tests.support.model_projects import Loads, write_model
from tests.support.projects import make_project


async def test_a_project_says_how_its_models_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """Where their copies are, how often the storage is looked at, and how many versions there are."""
    monkeypatch.setenv("CORTEX_MODEL_DIR", str(tmp_path / "copies"))
    write_model(tmp_path, "one", "up", "1")
    models = {"path": str(tmp_path / "up"), "reload_interval_seconds": 2, "latest_versions": 1}
    project = make_project(tmp_path / "project", "class Handler: ...\n", multi_model_reloading=models)
    async with open_models(project) as opened:
        assert opened.library is not None
        opened.library.loader.load_model = Loads()
        model = opened.library.client.get_model()
        assert model.folder.is_relative_to(tmp_path / "copies")
        write_model(tmp_path, "two", "up", "2")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened.library.watcher.wait_look)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1.9)
            await trio.testing.wait_all_tasks_blocked()
            assert opened.library.watcher.looks == 1
            mock_clock.jump(0.2)
        assert opened.library.client.get_model().text == "two"
    assert list((tmp_path / "copies").iterdir()) == []
