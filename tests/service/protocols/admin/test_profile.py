from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import Overloaded
from ovmstrio.protocols.admin.profile import merge_profiles
from ovmstrio.serving.profiling import Profiler, VersionCalls
from tests.support import ir
from tests.support.api_clients import BothInterfaces, serving_both
from tests.support.callers import bearer
from tests.support.waits import WAIT_SECONDS


@pytest.fixture
async def interfaces(tmp_path: Path) -> AsyncIterator[BothInterfaces]:
    """Serve the model "add"."""
    spec = ModelSpec(name="add", base_path=ir.save(ir.dummy(), tmp_path, "add"))
    async with serving_both([spec]) as both:
        yield both


async def _ask(interfaces: BothInterfaces, body: Any, key: str = "") -> httpx.Response:
    headers = bearer(key) if key else {}
    return await interfaces.request("POST", "/v2/profile", content=json.dumps(body), headers=headers)


def _infer(client: Any, module: Any) -> None:
    tensor = module.InferInput("b", [1, 10], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 10), np.float32))
    client.infer("add", [tensor])


async def test_a_profile_has_stacks_of_the_event_loop_and_layers_of_called_models(interfaces: BothInterfaces) -> None:
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await _ask(interfaces, {"seconds": 0.5, "rate": 200}))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while not answers:
            await interfaces.with_triton("http", _infer)
    profile = answers[0].json()
    assert answers[0].status_code == 200, profile
    threads = {each["name"]: each for each in profile["threads"]}
    loop = threads["event loop"]
    assert loop["samples"] == loop["waiting"] + sum(stack["samples"] for stack in loop["stacks"])
    assert {number for each in profile["threads"] for stack in each["stacks"] for number in stack["frames"]} <= set(
        range(len(profile["frames"]))
    )
    (model,) = profile["models"]
    assert (model["name"], model["calls"] > 0) == ("add", True)
    assert [layer["name"].split("_")[0] for layer in model["layers"]] == ["Add"]


async def test_layers_of_named_models_are_timed(interfaces: BothInterfaces) -> None:
    profile = (await _ask(interfaces, {"seconds": 0.01, "models": ["add"]})).json()
    (model,) = profile["models"]
    assert (model["name"], model["version"], model["calls"], len(model["layers"])) == ("add", "1", 0, 1)
    assert (await _ask(interfaces, {"seconds": 0.01, "models": []})).json()["models"] == []


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"seconds": 61}, 400, "seconds: expected 0.01 to 60, got 61"),
        ({"rate": 0}, 400, "rate: expected 1 to 1000, got 0"),
        ({"rate": "often"}, 400, "rate: expected a number"),
        ({"rate": float("nan"), "seconds": 10**400}, 400, "seconds: number too large"),
        ({"models": "add"}, 400, "models: expected a list of names"),
        ({"models": ["a"] * 9}, 400, "models: expected at most 8, got 9"),
        ({"second": 1}, 400, "profile: second not known, expected seconds, rate, models"),
        ({"seconds": 0.01, "models": ["nothing"]}, 404, "nothing"),
    ],
)
async def test_invalid_profile_options_are_refused(
    interfaces: BothInterfaces, body: Any, status: int, text: str
) -> None:
    answer = await _ask(interfaces, body)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text


async def test_one_profile_is_taken_at_a_time(interfaces: BothInterfaces) -> None:
    profiler = Profiler(interfaces.plane)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(profiler.take, 60, 100, [])
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="another profile is running"):
            await profiler.take(0.01, 100, [])
        nursery.cancel_scope.cancel()
    assert (await profiler.take(0.01, 100, [])).models == []


def _document(frames: list[str], stack: list[int], cpu: float) -> dict[str, Any]:
    stacks = [{"frames": stack, "samples": 2}]
    threads = {"name": "event loop", "samples": 2, "waiting": 0, "cpu_seconds": cpu, "stacks": stacks}
    return {
        "seconds": 1.0,
        "cpu_seconds": cpu,
        "native_cpu_seconds": 0.25,
        "frames": [{"name": name, "file": "/a.py", "line": 1} for name in frames],
        "threads": [threads],
        "processes": [{"service": "s", "pid": int(cpu), "cpu_seconds": 0.1}],
        "models": [],
    }


def test_profiles_of_several_processes_are_merged_with_each_frame_once() -> None:
    merged = merge_profiles(
        {1: _document(["inner", "outer"], [1, 0], 2.0), 0: _document(["outer", "other"], [0, 1], 1.0)}
    )
    names = [frame["name"] for frame in merged["frames"]]
    assert sorted(names) == ["inner", "other", "outer"]
    stacks = [[names[place] for place in each["stacks"][0]["frames"]] for each in merged["threads"]]
    assert stacks == [["outer", "other"], ["outer", "inner"]]
    assert [each["worker"] for each in merged["threads"]] == [0, 1]
    assert [(each["worker"], each["pid"]) for each in merged["processes"]] == [(0, 1), (1, 2)]
    assert (merged["cpu_seconds"], merged["native_cpu_seconds"]) == (3.0, 0.5)
    assert [each["cpu_seconds"] for each in merged["workers"]] == [1.0, 2.0]


async def test_models_called_in_other_processes_are_profiled(interfaces: BothInterfaces) -> None:
    async def others() -> list[VersionCalls]:
        return [VersionCalls("add", "1", 7, 0.5)]

    with trio.fail_after(WAIT_SECONDS):
        profile = await Profiler(interfaces.plane).take(0.05, 100, None, others)
    (model,) = profile.models
    assert (model.name, model.calls, profile.called) == ("add", 7, [])
    assert model.times is not None
