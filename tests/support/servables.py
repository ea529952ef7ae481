"""Models built by code, loaded as the server loads them, requests for them, and load trials."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio

from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.core.request import Contents, InferInput, InferRequest, InferResponse
from ovmstrio.core.tensor import BY_NAME, Array, Tensor, TensorSpec
from ovmstrio.core.worker_peers import SequenceOwners
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.crash_probe import CrashProbe, ProbeMode, crash_probe_of_user_code, open_crash_probe
from ovmstrio.inference.network import Network
from ovmstrio.inference.tuner import Placement
from ovmstrio.models.loading import load_model
from ovmstrio.models.sequences import SequenceManager, SequenceManagers
from ovmstrio.models.servable import BatchedServable, ModelServable
from ovmstrio.models.stateful import StatefulServable
from ovmstrio.models.validation import Validator
from tests.support import ir

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
"""The precision in which numbers are compared; the processor's own default may be bf16."""


class RecordingHooks(ServableHooks):
    def __init__(self) -> None:
        self.inferences: list[float] = []
        self.waits: list[float] = []
        self.batch_sizes: list[int] = []
        self.queue_times: list[float] = []
        self.streams = 0
        self.pools: list[tuple[int, int]] = []
        self.places: list[tuple[bool, bool]] = []
        self.bounds: list[tuple[bool, bool]] = []
        self.memory: dict[str, int] = {}
        self.fits: list[tuple[str, int, int]] = []

    def inferred(self, waited: float, seconds: float) -> None:
        self.inferences.append(seconds)
        self.waits.append(waited)

    def batch_size(self, size: int) -> None:
        self.batch_sizes.append(size)

    def queue_time(self, seconds: float) -> None:
        self.queue_times.append(seconds)

    def set_streams(self, count: int) -> None:
        self.streams = count

    def set_pool(self, size: int, active: int) -> None:
        self.pools.append((size, active))

    def set_execution_mode(self, *, inline: bool, changed: bool) -> None:
        self.places.append((inline, changed))

    def set_cpu_pinning(self, *, to_cores: bool, changed: bool) -> None:
        self.bounds.append((to_cores, changed))

    def record_padding(self, fit: str, given: int, added: int) -> None:
        self.fits.append((fit, given, added))

    def set_load_seconds(self, seconds: float) -> None:
        """Forget it."""

    def set_memory(self, part: str, size: int) -> None:
        self.memory[part] = size


def _spec(model: ov.Model, repository: Path, name: str, settings: dict[str, Any]) -> ModelSpec:
    base_path = ir.save(model, repository, name)
    plugin_config = {**EXACT, **settings.pop("plugin_config", {})}
    return ModelSpec(name=name, base_path=base_path, plugin_config=plugin_config, **settings)


async def load(
    model: ov.Model, repository: Path, name: str = "model", *, hooks: ServableHooks = NULL_HOOKS, **settings: Any
) -> ModelServable:
    spec = _spec(model, repository, name, settings)
    servable = await load_model(spec, 1, spec.base_path / "1", hooks=hooks)
    assert isinstance(servable, ModelServable)
    return servable


async def load_batched(
    model: ov.Model,
    repository: Path,
    tasks: trio.Nursery,
    batching: BatchingSpec,
    *,
    hooks: ServableHooks = NULL_HOOKS,
    **settings: Any,
) -> BatchedServable:
    spec = _spec(model, repository, "model", {"batching": batching, **settings})
    servable = await load_model(spec, 1, spec.base_path / "1", hooks=hooks, tasks=tasks)
    assert isinstance(servable, BatchedServable)
    return servable


async def load_stateful(
    model: ov.Model,
    repository: Path,
    name: str = "model",
    *,
    version: int = 1,
    managers: SequenceManagers | None = None,
    owners: SequenceOwners | None = None,
    **settings: Any,
) -> StatefulServable:
    ir.save(model, repository, name, version)
    spec = _spec(model, repository, name, {"stateful": True, **settings})
    servable = await load_model(spec, version, spec.base_path / str(version), managers=managers, owners=owners)
    assert isinstance(servable, StatefulServable)
    return servable


async def load_managed(model: ov.Model, repository: Path, **settings: Any) -> tuple[StatefulServable, SequenceManager]:
    managers = SequenceManagers()
    servable = await load_stateful(model, repository, managers=managers, **settings)
    (manager,) = managers
    return servable, manager


def stateful_over(
    model: ov.Model,
    repository: Path,
    wrap: Callable[[Network], Any],
    *,
    managers: SequenceManagers | None = None,
    placement: Placement | None = None,
    **settings: Any,
) -> StatefulServable:
    spec = _spec(model, repository, "model", {"stateful": True, **settings})
    compiled = compile_model(ModelFile(spec.base_path / "1" / "model.xml", spec))
    made = Network(compiled if placement is None else replace(compiled, placement=placement))
    return StatefulServable(spec, 1, wrap(made), managers or SequenceManagers())


def network(
    model: ov.Model, repository: Path, name: str = "model", *, hooks: ServableHooks = NULL_HOOKS, **settings: Any
) -> Network:
    spec = _spec(model, repository, name, settings)
    return Network(compile_model(ModelFile(spec.base_path / "1" / "model.xml", spec)), hooks)


def raw_request(arrays: dict[str, np.ndarray[Any, Any]], datatypes: dict[str, str] | None = None) -> InferRequest:
    """Make a request with raw buffers; a datatype that is not given is found by the array's dtype."""
    names = {row.numpy: row.name for row in BY_NAME.values() if row.name != "BF16"}
    types = {name: names[array.dtype] for name, array in arrays.items()} | (datatypes or {})
    inputs = [InferInput(name, types[name], array.shape) for name, array in arrays.items()]
    return InferRequest("model", inputs=inputs, raw_inputs=[array.tobytes() for array in arrays.values()])


def contents_request(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> InferRequest:
    contents = Contents(BY_NAME[datatype].contents_field, values)
    return InferRequest("model", inputs=[InferInput(name, datatype, shape, contents)])


def sequence_request(
    arrays: dict[str, np.ndarray[Any, Any]], *, number: int | None = None, control: int | None = None
) -> InferRequest:
    special: dict[str, np.ndarray[Any, Any]] = {}
    if number is not None:
        special["sequence_id"] = np.array([number], np.uint64)
    if control is not None:
        special["sequence_control_input"] = np.array([control], np.uint32)
    return raw_request({**special, **arrays})


def tensors(response: InferResponse) -> list[Tensor]:
    outputs = [output for output in response.outputs if isinstance(output, Tensor)]
    assert len(outputs) == len(response.outputs)
    return outputs


def validate(request: InferRequest, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    return Validator(inputs)(request)


def saved(model: ov.Model, repository: Path, name: str = "model", **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, base_path=ir.save(model, repository, name), plugin_config=EXACT, **settings)


async def load_saved(spec: ModelSpec) -> list[Problem]:
    remarks: list[Problem] = []
    probe = crash_probe_of_user_code()
    servable = await load_model(spec, 1, spec.base_path / "1", warn=remarks.append, probe=probe)
    await servable.aclose()
    return remarks


async def refusal_of(spec: ModelSpec) -> Problem:
    with pytest.raises(ConfigError) as caught:
        await load_saved(spec)
    (problem,) = caught.value.problems
    return problem


@asynccontextmanager
async def trying(folder: Path, mode: ProbeMode = "auto", **options: float) -> AsyncIterator[CrashProbe | None]:
    async with trio.open_nursery() as nursery:
        with open_crash_probe(nursery, mode, folder, **options) as probe:
            yield probe
        nursery.cancel_scope.cancel()


def verdicts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in sorted((folder / "verdicts").glob("*"))]
