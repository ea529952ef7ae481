from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.config.specs import HandlerSpec, ModelSpec, ServerSpec, TextModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.models.sequences.store import STORE_FILE, check_worker_count, worker_folder
from ovmstrio.server.command_line import UsageError, read_settings
from ovmstrio.server.plan import read_plan
from ovmstrio.server.server import serve
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.worker_count import MeasuredCall, choose_count, count_workers, models_to_measure
from ovmstrio.util.container_limits import usable_cores
from ovmstrio.workers.auto_workers import choose_workers
from ovmstrio.workers.serve import serve_in_processes
from tests.support import ir

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan

HERE = Path("/nowhere")
MODEL = ModelSpec(name="m", base_path=HERE)
TEXT = TextModelSpec(name="t", base_path=HERE, path=HERE)
REMOTE = RemoteSpec(name="r", base_path=HERE, remote_name="r")
PATIENCE_SECONDS = 120
HANDLER = HandlerSpec(name="h", base_path=HERE, path=HERE)


_ALL = usable_cores()


@pytest.mark.parametrize(
    ("workers", "services", "count"),
    [
        (None, (MODEL,), 1),
        ("3", (MODEL,), 3),
        ("auto", (MODEL,), 1),
        ("auto", (MODEL, HANDLER), _ALL),
        ("auto", (TEXT, HANDLER), _ALL),
    ],
)
def test_workers_are_counted_by_option_and_services(workers: str | None, services: tuple[Any, ...], count: int) -> None:
    options: dict[str, Any] = {} if workers is None else {"workers": workers}
    assert count_workers(ServerSettings(**options), ServerSpec(services=services)) == count


TRIVIAL, HALF, LONG = MeasuredCall(20e-6, 0.0), MeasuredCall(120e-6, 200e-6), MeasuredCall(300e-6, 20e-3)
COMPUTING = "mostly OpenVINO compute, which uses all cores from one process"


@pytest.mark.parametrize(
    ("cores", "measured", "services", "count", "reason"),
    [
        (8, {"m": TRIVIAL}, (MODEL,), 8, "100% on the event loop"),
        (8, {"m": LONG}, (MODEL,), 1, ""),
        (8, {"m": HALF}, (MODEL,), 4, "50% on the event loop"),
        (2, {"m": HALF}, (MODEL,), 1, ""),
        (
            4,
            {"m": LONG, "small": TRIVIAL},
            (MODEL,),
            4,
            "a call of model 'small' spends 100% on the event loop, 0.00 ms in other threads",
        ),
        (4, {}, (HANDLER,), 4, "the handler 'h' may run Python code, which uses one core per process"),
        (4, {}, (REMOTE,), 4, "the remote model 'r' is called from the event loop, which uses one core per process"),
        (4, {}, (MODEL,), 1, COMPUTING),
        (4, {}, (TEXT,), 1, COMPUTING),
        (1, {"m": TRIVIAL}, (HANDLER,), 1, "one usable core"),
    ],
)
def test_workers_are_chosen_by_cores_measured_calls_and_kinds(
    cores: int, measured: dict[str, MeasuredCall], services: tuple[Any, ...], count: int, reason: str
) -> None:
    chosen = choose_count(services, cores, measured)
    assert chosen.count == count
    assert reason in chosen.reason


@pytest.mark.parametrize(
    ("memory", "services", "count", "reason"),
    [
        ({"model_bytes": 4 * 10**9, "memory_bytes": 16 * 10**9}, (MODEL,), 2, ""),
        ({"model_bytes": 9 * 10**9, "memory_bytes": 16 * 10**9}, (HANDLER,), 1, "9.0 GB of models"),
        ({"model_bytes": 4 * 10**9}, (MODEL,), 8, ""),
    ],
)
def test_copies_of_models_are_limited_to_half_of_the_memory(
    memory: dict[str, int], services: tuple[Any, ...], count: int, reason: str
) -> None:
    chosen = choose_count(services, 8, {"m": TRIVIAL}, **memory)
    assert chosen.count == count
    assert reason in chosen.reason


def test_only_models_whose_times_decide_are_measured() -> None:
    assert models_to_measure([MODEL, TEXT], 2) == [MODEL]
    stateful = ModelSpec(name="s", base_path=HERE, stateful=True)
    assert (
        models_to_measure([MODEL, HANDLER], 2)
        == models_to_measure([MODEL], 1)
        == models_to_measure([stateful], 2)
        == []
    )


async def test_stored_sequences_decide_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.workers.auto_workers.usable_cores", lambda: 2)
    ir.save(ir.dummy(), tmp_path, "m")
    store = tmp_path / "store"
    for row in range(3):
        part = worker_folder(store, row, 3)
        part.mkdir(parents=True)
        (part / STORE_FILE).touch()
    settings = ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0, sequence_store=store)
    with trio.fail_after(PATIENCE_SECONDS):
        plan = await choose_workers(await read_plan(settings))
    assert (plan.processes, plan.workers_reason) == (3, "--sequence-store has sequences of this number of workers")
    check_worker_count(store, plan.processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_while_workers_are_measured_ends_the_server_gently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    ready = tmp_path / "ready"
    ready.touch()

    async def measure(_: Plan) -> None:
        assert not ready.exists()
        signal.raise_signal(number)
        await trio.sleep_forever()

    monkeypatch.setattr("ovmstrio.workers.auto_workers.choose_workers", measure)
    # This process does not belong to the server.
    monkeypatch.setattr("ovmstrio.server.process_main.configure_malloc", lambda: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    settings = ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0, readiness_file=ready)
    plan = await read_plan(settings)
    with trio.fail_after(PATIENCE_SECONDS):
        assert await serve_in_processes(plan) is True


@pytest.mark.parametrize("value", ["-1", "many", "257", "1.5"])
def test_invalid_number_of_workers_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        read_settings({"workers": value})


async def test_server_in_a_program_refuses_several_workers() -> None:
    with pytest.raises(ConfigError, match="ovms serve"):
        await serve(ServerSettings(workers=2))
