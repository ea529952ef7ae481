"""What a worker process makes of its task."""

from __future__ import annotations

import logging
from pathlib import Path

from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.workers.task import WorkerTask
from ovmstrio.server.workers.worker import _plan_of


async def test_a_worker_has_the_options_of_its_server(tmp_path: Path) -> None:
    """Those of the log, too, of which it has one of its own."""
    file = tmp_path / "config.json"
    file.write_text('{"model_config_list": []}', encoding="utf-8")
    settings = ServerSettings(config_path=file, workers="2", log_levels="registry=error", drain_seconds=7)
    plan = await read_plan(settings)
    before = dict(LOG_LEVEL.parts)
    try:
        made = await _plan_of(WorkerTask.of(plan, 2, 1, "secret"))
        assert dict(LOG_LEVEL.parts) == {"registry": logging.ERROR}
    finally:
        LOG_LEVEL.set_parts(before)
    assert (made.processes, made.settings.config_path, made.settings.drain_seconds) == (2, file, 7)
