"""How many processes serve a configuration."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.config.specs import HandlerSpec, ModelSpec, ServerSpec
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.models.sequences.store import STORE_FILE
from ovmstrio.server.command_line import UsageProblems, read_settings
from ovmstrio.server.life import serve
from ovmstrio.server.own_process import serve_in_own_process
from ovmstrio.server.plan import read_plan
from ovmstrio.server.project_plan import plan_project
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.worker_count import MeasuredCall, choose_count, count_workers, worth_measuring
from ovmstrio.server.workers.choosing import choose_workers
from ovmstrio.server.workers.stores import check_store, part_of_store
from ovmstrio.work.cores import usable_cores
from tests.support import ir
from tests.support.projects import make_project

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan

HERE = Path("/nowhere")
MODEL = ModelSpec(name="m", base_path=HERE)
TEXT = TextModelSpec(name="t", base_path=HERE, path=HERE)
REMOTE = RemoteSpec(name="r", base_path=HERE, remote_name="r")
PATIENCE_SECONDS = 120
HANDLER = HandlerSpec(name="h", base_path=HERE, path=HERE)


def _count(*services: Any, **options: Any) -> int:
    return count_workers(ServerSettings(**options), ServerSpec(services=services))


def test_there_is_one_process_unless_more_are_asked_for() -> None:
    """And as many as are asked for then."""
    assert _count(MODEL) == 1
    assert _count(MODEL, workers="3") == 3


def test_auto_is_a_process_a_core_where_python_code_of_users_may_run() -> None:
    """Models fill all cores from one process, as far as nothing is measured."""
    cores = usable_cores()
    assert _count(MODEL, workers="auto") == 1
    assert _count(MODEL, HANDLER, workers="auto") == cores
    assert _count(TEXT, HANDLER, workers="auto") == cores


def _choose(cores: int, measured: dict[str, MeasuredCall], *services: Any, **memory: int) -> tuple[int, str]:
    chosen = choose_count(services or (MODEL,), cores, measured, **memory)
    return chosen.count, chosen.reason


TRIVIAL = MeasuredCall(20e-6, 0.0)
LONG = MeasuredCall(300e-6, 20e-3)


def test_there_is_a_process_for_each_core_that_event_loops_can_fill() -> None:
    """All of a trivial call is the loop's, and of a long one next to nothing; half of a call is half of the cores."""
    assert _choose(8, {"m": TRIVIAL})[0] == 8
    assert _choose(8, {"m": LONG})[0] == 1
    half = MeasuredCall(120e-6, 200e-6)
    assert (half.loop_part, _choose(8, {"m": half})[0], _choose(2, {"m": half})[0]) == (0.5, 4, 1)


def test_the_model_that_needs_the_loop_most_decides_and_is_named() -> None:
    """With what was measured of it."""
    count, reason = _choose(4, {"m": LONG, "small": TRIVIAL})
    assert (count, reason) == (
        4,
        "of a call of the model 'small' 100% is work of the event loop, and 0.00 ms beside it",
    )


@pytest.mark.parametrize(
    ("service", "count", "reason"),
    [
        (HANDLER, 4, "the handler 'h' may run Python code, of which one process fills one core"),
        (REMOTE, 4, "the remote model 'r' is asked by the event loop, of which one process fills one core"),
        (MODEL, 1, "computing is most of what is served, and fills all cores from one process"),
        (TEXT, 1, "computing is most of what is served, and fills all cores from one process"),
    ],
)
def test_kinds_decide_where_nothing_is_measured(service: Any, count: int, reason: str) -> None:
    """Code of users is not called without a client; what could not be measured is taken for computing."""
    assert _choose(4, {}, service) == (count, reason)


def test_one_core_is_one_process() -> None:
    """Whatever is served."""
    assert _choose(1, {"m": TRIVIAL}, HANDLER) == (1, "the server may use one core")


def test_there_are_no_more_copies_of_models_than_half_of_the_memory_holds() -> None:
    """One at least; where nobody knows how much there is, there is no bound."""
    assert _choose(8, {"m": TRIVIAL}, model_bytes=4 * 10**9, memory_bytes=16 * 10**9)[0] == 2
    count, reason = _choose(8, {}, HANDLER, model_bytes=9 * 10**9, memory_bytes=16 * 10**9)
    assert (count, "9.0 GB of models" in reason) == (1, True)
    assert _choose(8, {"m": TRIVIAL}, model_bytes=4 * 10**9)[0] == 8


def test_only_models_whose_times_decide_are_measured() -> None:
    """Beside what decides by its kind, and on one core, nothing is loaded for that."""
    assert worth_measuring([MODEL, TEXT], 2) == [MODEL]
    stateful = ModelSpec(name="s", base_path=HERE, stateful=True)
    assert worth_measuring([MODEL, HANDLER], 2) == worth_measuring([MODEL], 1) == worth_measuring([stateful], 2) == []


async def test_kept_sequences_say_how_many_processes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number, which measuring may give from one start to the next, would not find them, and would not start."""
    monkeypatch.setattr("ovmstrio.server.workers.choosing.usable_cores", lambda: 2)
    ir.save(ir.dummy(), tmp_path, "m")
    store = tmp_path / "store"
    for row in range(3):
        part = part_of_store(store, row, 3)
        part.mkdir(parents=True)
        (part / STORE_FILE).touch()
    settings = ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0, sequence_store=store)
    with trio.fail_after(PATIENCE_SECONDS):
        plan = await choose_workers(await read_plan(settings))
    assert (plan.processes, plan.workers_reason) == (3, "--sequence_store has the sequences of so many")
    check_store(store, plan.processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_server_that_is_told_to_end_while_it_measures_ends_gently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As at any other time; meanwhile nothing says that it is ready."""
    ready = tmp_path / "ready"
    ready.touch()

    async def measure(_: Plan) -> None:
        assert not ready.exists()
        signal.raise_signal(number)
        await trio.sleep_forever()

    monkeypatch.setattr("ovmstrio.server.workers.choosing.choose_workers", measure)
    # This process is not the server's own.
    monkeypatch.setattr("ovmstrio.server.own_process.keep_freed_memory", lambda: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    settings = ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0, readiness_file=ready)
    plan = await read_plan(settings)
    with trio.fail_after(PATIENCE_SECONDS):
        assert await serve_in_own_process(plan) is True


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
