"""How many processes serve a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import HandlerSpec, ModelSpec, ServerSpec
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.server.command_line import UsageProblems, read_settings
from ovmstrio.server.life import serve
from ovmstrio.server.project_plan import plan_project
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.worker_count import count_workers
from ovmstrio.work.cores import usable_cores
from tests.support.projects import make_project

HERE = Path("/nowhere")
MODEL = ModelSpec(name="m", base_path=HERE)
HANDLER = HandlerSpec(name="h", base_path=HERE, path=HERE)


def _count(*services: Any, **options: Any) -> int:
    return count_workers(ServerSettings(**options), ServerSpec(services=services))


def test_there_is_one_process_unless_more_are_asked_for() -> None:
    """And as many as are asked for then."""
    assert _count(MODEL) == 1
    assert _count(MODEL, workers="3") == 3


def test_auto_is_a_process_a_core_where_python_code_of_users_may_run() -> None:
    """Models fill all cores from one process."""
    cores = usable_cores()
    assert _count(MODEL, workers="auto") == 1
    assert _count(MODEL, HANDLER, workers="auto") == cores
    assert _count(TextModelSpec(name="t", base_path=HERE, path=HERE), HANDLER, workers="auto") == cores


@pytest.mark.parametrize("value", ["-1", "many", "257", "1.5"])
def test_a_number_that_is_none_is_an_error_of_usage(value: str) -> None:
    """As for other options."""
    with pytest.raises(UsageProblems, match="--workers"):
        read_settings({"workers": value})


def test_a_project_says_in_its_file_how_many_processes_it_has(tmp_path: Path) -> None:
    """The option is refused there."""
    project = make_project(tmp_path, "class Handler:\n    def handle_post(self, payload):\n        return 1\n")
    with pytest.raises(UsageProblems, match=r"--workers.*nucleus\.yaml"):
        plan_project(project, {"workers": "2"})


async def test_a_server_in_a_program_is_one_process() -> None:
    """What the settings ask for is not left out silently."""
    with pytest.raises(ConfigError, match="ovms serve"):
        await serve(ServerSettings(workers=2))
