"""Local Paddle models: alias mapping, loading, device selection and OpenVINO settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compile import ModelFile, compile_loaded
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import ProbeModel
from ovmstrio.inference.model_readers import read_paddle
from ovmstrio.inference.runtime import available_devices
from ovmstrio.inference.signature import ModelSignature, port_names
from ovmstrio.ops.predictor.model_config import ModelConfig, Variable, check, check_fetch, prepare, read_model_config
from ovmstrio.ops.predictor.protocol import Feed
from ovmstrio.ops.settings import LocalServiceConf

# Loading


def map_aliases(config: ModelConfig, inputs: Sequence[str], outputs: Sequence[str], folder: str) -> TensorMapping:
    """Return the alias of each tensor by its model name; ConfigError for surplus variables or unmapped inputs.

    A variable belongs to the tensor of the same name.  Remaining variables match the remaining tensors in file order,
    because Paddle's tools rename tensors on saving.
    """
    problems: list[Problem] = []
    sides = [
        _side(variables, names, folder, "feed" if variables is config.feeds else "fetch", problems)
        for variables, names in ((config.feeds, inputs), (config.fetches, outputs))
    ]
    unmapped = [name for name in inputs if name not in sides[0]]
    if unmapped and not problems:
        listed = ", ".join(map(repr, unmapped))
        problems.append(Problem(f"no feed_var for model inputs {listed}", file=folder))
    if problems:
        raise ConfigError(problems)
    return TensorMapping(*sides)


def _side(
    variables: Sequence[Variable], names: Sequence[str], folder: str, side: str, problems: list[Problem]
) -> dict[str, str]:
    aliases = {variable.name: variable.alias for variable in variables if variable.name in names}
    unnamed = [variable for variable in variables if variable.name not in names]
    free = [name for name in names if name not in aliases]
    if len(unnamed) > len(free):
        listed = ", ".join(repr(variable.name) for variable in unnamed)
        message = f"more {side}_var than tensors of the model: {listed}"
        problems.append(Problem(message, file=folder, expected=", ".join(names), found=listed))
    by_position = dict(zip(free, (variable.alias for variable in unnamed), strict=False))
    if by_position:
        log.info("tensors matched by position", model=folder, side=side, aliases=by_position)
    return aliases | by_position


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Aliases and signature of a model, without the compiled model."""

    config: ModelConfig
    signature: ModelSignature

    @property
    def feed_names(self) -> list[str]:
        """Input aliases."""
        return [variable.alias for variable in self.config.feeds]

    @property
    def fetch_names(self) -> list[str]:
        """Output aliases."""
        return [variable.alias for variable in self.config.fetches]

    def arrays(self, feed: Feed, *, batch: bool) -> list[Array]:
        """Return the model's inputs in the order of its signature; raises as :func:`~.model_config.prepare`."""
        return prepare(feed, self.signature.inputs, batch=batch)

    def check(self, feed: Feed) -> None:
        """Reject an invalid batched feed; raises as :meth:`arrays`."""
        check(feed, self.signature.inputs, batch=True)

    def wanted(self, fetch: Sequence[str] | None) -> list[Variable]:
        """Return the requested outputs, all if no names are given; raises FeedMismatch for unknown names."""
        names = fetch or self.fetch_names
        check_fetch(names, self.fetch_names)
        by_alias = {variable.alias: variable for variable in self.config.fetches}
        return [by_alias[name] for name in names]

    def answer(self, outputs: Sequence[Array], requested: Sequence[Variable]) -> dict[str, Array]:
        """Return the requested outputs in their configured dtypes."""
        by_name = dict(zip((spec.name for spec in self.signature.outputs), outputs, strict=True))
        return {variable.alias: _declared(by_name[variable.alias], variable) for variable in requested}


def _declared(array: Array, variable: Variable) -> Array:
    """Cast to the configured dtype: OpenVINO computes some integers in another width than Paddle."""
    same_kind = array.dtype.kind == variable.dtype.kind
    return array.astype(variable.dtype, copy=False) if same_kind else array


def load_local_model(folder: Path, device: str, plugin_config: Mapping[str, str]) -> tuple[LocalModel, Compiled]:
    """Read and compile the model of a folder; blocking; ConfigError if it or its configuration is unusable."""
    config = read_model_config(folder)
    _refuse_sequences(config, str(folder))
    model = read_paddle(folder)
    names = (port_names(model.inputs, {}, is_input=True), port_names(model.outputs, {}, is_input=False))
    mapping = map_aliases(config, *names, str(folder))
    spec = ModelSpec(name=folder.name, base_path=folder, target_device=device, plugin_config=dict(plugin_config))
    compiled = compile_loaded(model, ModelFile(folder, spec, mapping))
    return LocalModel(config, compiled.signature), compiled


def local_crash_probe(folder: Path, device: str, plugin_config: Mapping[str, str]) -> ProbeModel:
    """Return the crash probe for :func:`load_local_model`."""
    settings = [device, dict(plugin_config)]
    return ProbeModel(
        name=folder.name,
        path=folder,
        compile=f"{__name__}:{compile_plain.__name__}",
        argument=[str(folder), *settings],
        read="ovmstrio.inference.model_readers:read_paddle",
        source=folder,
        device=device,
        settings=settings,
    )


def compile_plain(argument: Sequence[Any]) -> Compiled:
    """Compile a model from plain arguments, for a crash probe."""
    folder, device, plugin_config = argument
    _, compiled = load_local_model(Path(folder), device, plugin_config)
    return compiled


def _refuse_sequences(config: ModelConfig, folder: str) -> None:
    """Reject inputs with row offsets; outputs with declared offsets are common and come without them."""
    without = [variable.alias for variable in config.fetches if variable.lod]
    if without:
        log.warning("OpenVINO has no LoD tensors, outputs have no row offsets", model=folder, fetch=without)
    ragged = [variable.alias for variable in config.feeds if variable.lod]
    if ragged:
        message = f"OpenVINO has no LoD tensors, but {', '.join(map(repr, ragged))} are declared as such"
        hint = "export the model with padded batches; if all samples are equally long, set is_lod_tensor: false"
        raise ConfigError([Problem(message, file=folder, path="is_lod_tensor", suggestion=hint)])


# Devices and OpenVINO settings

_CPU: Final = "CPU"
_BY_DEVICES: Final = -1
_ON_CPU: Final = frozenset({0, 3})
_ON_GPU: Final = frozenset({1, 2})
_DEVICE_TYPES: Final = "-1 (as 'devices' says), 0 and 3 (CPU), 1 and 2 (GPU)"
_PRECISIONS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def select_device(settings: LocalServiceConf, worker: int) -> str:
    """Return a worker's device, round-robin over ``available_devices``; the CPU if the GPU is missing."""
    kind = settings.device_type
    if kind not in {_BY_DEVICES, *_ON_CPU, *_ON_GPU}:
        message = "unsupported device type"
        raise ConfigError([Problem(message, path="device_type", expected=_DEVICE_TYPES, found=str(kind))])
    numbers = _numbers(settings)
    if kind in _ON_CPU or not (numbers or kind in _ON_GPU):
        return _CPU
    number = numbers[worker % len(numbers)] if numbers else "0"
    available = available_devices()
    for name in (f"GPU.{number}", *(["GPU"] if number == "0" else [])):
        if name in available:
            return name
    log.warning("GPU not found, using CPU", wanted=f"GPU.{number}", devices=available, worker=worker)
    return _CPU


def _numbers(settings: LocalServiceConf) -> tuple[str, ...]:
    numbers = settings.device_ids
    if not all(number.isdecimal() for number in numbers):
        expected, found = "comma-separated numbers", repr(settings.devices)
        raise ConfigError([Problem("malformed list of devices", path="devices", expected=expected, found=found)])
    return numbers


def count_workers(device: str, settings: LocalServiceConf, concurrency: int) -> int:
    """Return the number of an Op's workers on a device."""
    return sum(select_device(settings, worker) == device for worker in range(concurrency))


def plugin_config(settings: LocalServiceConf, device: str, workers: int) -> dict[str, str]:
    """Return OpenVINO's settings: a stream per worker and ``thread_num`` threads each, within the number of CPUs."""
    config = {"INFERENCE_PRECISION_HINT": _precision(settings.precision, device)}
    if device != _CPU:
        return config | {"NUM_STREAMS": str(workers)}
    threads = max(1, min(settings.thread_num * workers, len(os.sched_getaffinity(0))))
    return config | {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": str(min(workers, threads))}


def _precision(precision: str, device: str) -> str:
    hint = _PRECISIONS.get(precision.lower())
    if hint is None:
        log.warning("precision not supported, using fp32", precision=precision, device=device)
        return _PRECISIONS["fp32"]
    return hint
