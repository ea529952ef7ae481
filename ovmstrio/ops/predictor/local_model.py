"""A Paddle model of this process: read, compiled, and known by its aliases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compile import ModelFile, compile_read
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import Trial
from ovmstrio.inference.reading import read_paddle
from ovmstrio.inference.runtime import devices
from ovmstrio.inference.signature import ModelSignature, port_names
from ovmstrio.ops.predictor.model_config import ModelConfig, Variable, check, check_fetch, prepare, read_model_config
from ovmstrio.ops.predictor.protocol import Feed
from ovmstrio.ops.settings import LocalServiceConf

__all__ = [
    "LocalModel",
    "compile_plain",
    "device_for",
    "load_local_model",
    "local_trial",
    "map_aliases",
    "plugin_config",
    "workers_on",
]

# ----------------------------------------------------------------------
# A Paddle model of this process: read, compiled, and known by its aliases
# ----------------------------------------------------------------------


def map_aliases(config: ModelConfig, inputs: Sequence[str], outputs: Sequence[str], folder: str) -> TensorMapping:
    """Give the alias of each tensor, by the name that the model has for it.

    A variable is for the tensor of its name.  Those whose names the model has not are for the tensors left over, in
    the file's order, because Paddle's tools rename tensors as they save them.

    Raises:
        ConfigError: there are more variables than tensors, or the model takes what the file does not list.
    """
    problems: list[Problem] = []
    sides = [
        _side(variables, names, folder, "feed" if variables is config.feeds else "fetch", problems)
        for variables, names in ((config.feeds, inputs), (config.fetches, outputs))
    ]
    left_over = [name for name in inputs if name not in sides[0]]
    if left_over and not problems:
        listed = ", ".join(map(repr, left_over))
        problems.append(Problem(f"the model takes {listed} too, for which there is no feed_var", file=folder))
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
        message = f"the model has not as many tensors as there are {side}_var: {listed}"
        problems.append(Problem(message, file=folder, expected=", ".join(names), found=listed))
    by_position = dict(zip(free, (variable.alias for variable in unnamed), strict=False))
    if by_position:
        log.info("tensors matched by position", model=folder, side=side, aliases=by_position)
    return aliases | by_position


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What a model takes and gives, and how Ops name that; it does not keep what is compiled."""

    config: ModelConfig
    signature: ModelSignature

    @property
    def feed_names(self) -> list[str]:
        """The aliases of what it takes."""
        return [variable.alias for variable in self.config.feeds]

    @property
    def fetch_names(self) -> list[str]:
        """The aliases of what it gives."""
        return [variable.alias for variable in self.config.fetches]

    def arrays(self, feed: Feed, *, batch: bool) -> list[Array]:
        """Give the model's inputs in the order of its signature; see :func:`~.feeding.prepare` for what it raises."""
        return prepare(feed, self.signature.inputs, batch=batch)

    def check(self, feed: Feed) -> None:
        """Refuse a feed, with its batch axis, that does not fit; raises what :meth:`arrays` raises."""
        check(feed, self.signature.inputs, batch=True)

    def wanted(self, fetch: Sequence[str] | None) -> list[Variable]:
        """Give the outputs to fetch: those named, or all for no names.

        Raises:
            FeedMismatch: the model does not give one of them.
        """
        names = fetch or self.fetch_names
        check_fetch(names, self.fetch_names)
        by_alias = {variable.alias: variable for variable in self.config.fetches}
        return [by_alias[name] for name in names]

    def answer(self, outputs: Sequence[Array], wanted: Sequence[Variable]) -> dict[str, Array]:
        """Pick the outputs wanted, of the whole or decimal types that the configuration tells."""
        by_name = dict(zip((spec.name for spec in self.signature.outputs), outputs, strict=True))
        return {variable.alias: _declared(by_name[variable.alias], variable) for variable in wanted}


def _declared(array: Array, variable: Variable) -> Array:
    """OpenVINO computes some integers in another width than Paddle."""
    same_kind = array.dtype.kind == variable.dtype.kind
    return array.astype(variable.dtype, copy=False) if same_kind else array


def load_local_model(folder: Path, device: str, plugin_config: Mapping[str, str]) -> tuple[LocalModel, Compiled]:
    """Read and compile the model of a folder.  Blocks for as long as that takes.

    Raises:
        ConfigError: the folder holds no model that OpenVINO can run, or its configuration does not fit.
    """
    config = read_model_config(folder)
    _refuse_sequences(config, str(folder))
    model = read_paddle(folder)
    names = (_names(model.inputs, is_input=True), _names(model.outputs, is_input=False))
    mapping = map_aliases(config, *names, str(folder))
    spec = ModelSpec(name=folder.name, base_path=folder, target_device=device, plugin_config=dict(plugin_config))
    compiled = compile_read(model, ModelFile(folder, spec, mapping))
    return LocalModel(config, compiled.signature), compiled


def local_trial(folder: Path, device: str, plugin_config: Mapping[str, str]) -> Trial:
    """Make the trial of what :func:`load_local_model` would load."""
    settings = [device, dict(plugin_config)]
    return Trial(
        name=folder.name,
        path=folder,
        compile=f"{__name__}:{compile_plain.__name__}",
        argument=[str(folder), *settings],
        read="ovmstrio.inference.reading:read_paddle",
        source=folder,
        device=device,
        settings=settings,
    )


def compile_plain(argument: Sequence[Any]) -> Compiled:
    """Load a model of plain data, for a trial.

    Raises:
        ConfigError: as :func:`load_local_model`.
    """
    folder, device, plugin_config = argument
    _, compiled = load_local_model(Path(folder), device, plugin_config)
    return compiled


def _names(ports: Sequence[Any], *, is_input: bool) -> list[str]:
    return port_names(ports, {}, is_input=is_input)


def _refuse_sequences(config: ModelConfig, folder: str) -> None:
    """Refuse inputs with row offsets; an output is often said to have some, and comes without."""
    without = [variable.alias for variable in config.fetches if variable.lod]
    if without:
        log.warning("OpenVINO has no LoD tensors: outputs come without row offsets", model=folder, fetch=without)
    ragged = [variable.alias for variable in config.feeds if variable.lod]
    if ragged:
        message = f"OpenVINO has no LoD tensors, which {', '.join(map(repr, ragged))} are said to be"
        way_out = "export the model with padded batches; if all samples are equally long, write is_lod_tensor: false"
        raise ConfigError([Problem(message, file=folder, path="is_lod_tensor", suggestion=way_out)])


# ----------------------------------------------------------------------
# Where and how exactly a local model runs, in OpenVINO's words for Paddle Serving's settings
# ----------------------------------------------------------------------

_CPU: Final = "CPU"
_BY_DEVICES: Final = -1
_ON_CPU: Final = frozenset({0, 3})
_ON_GPU: Final = frozenset({1, 2})
_KINDS: Final = "-1 (as 'devices' says), 0 and 3 (CPU), 1 and 2 (GPU)"
_PRECISIONS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def device_for(settings: LocalServiceConf, worker: int) -> str:
    """Give the device of a worker: they take turns with the devices; without a GPU here, the CPU takes its place.

    Raises:
        ConfigError: OpenVINO has no device of that kind, or ``devices`` is no list of numbers.
    """
    kind = settings.device_type
    if kind not in {_BY_DEVICES, *_ON_CPU, *_ON_GPU}:
        message = "OpenVINO has no device of this kind"
        raise ConfigError([Problem(message, path="device_type", expected=_KINDS, found=str(kind))])
    numbers = _numbers(settings)
    if kind in _ON_CPU or not (numbers or kind in _ON_GPU):
        return _CPU
    number = numbers[worker % len(numbers)] if numbers else "0"
    there = devices()
    for name in (f"GPU.{number}", *(["GPU"] if number == "0" else [])):
        if name in there:
            return name
    log.warning("no such GPU here, the CPU takes its place", wanted=f"GPU.{number}", devices=there, worker=worker)
    return _CPU


def _numbers(settings: LocalServiceConf) -> tuple[str, ...]:
    numbers = settings.device_ids
    if not all(number.isdecimal() for number in numbers):
        expected, found = "numbers with commas between", repr(settings.devices)
        raise ConfigError([Problem("no list of devices", path="devices", expected=expected, found=found)])
    return numbers


def workers_on(device: str, settings: LocalServiceConf, concurrency: int) -> int:
    """Count the workers of an Op that run on a device."""
    return sum(device_for(settings, worker) == device for worker in range(concurrency))


def plugin_config(settings: LocalServiceConf, device: str, workers: int) -> dict[str, str]:
    """Give OpenVINO's settings for a model that so many workers share.

    Each worker has ``thread_num`` threads, as far as there are processors, and a stream of its own.
    """
    config = {"INFERENCE_PRECISION_HINT": _precision(settings.precision, device)}
    if device != _CPU:
        return config | {"NUM_STREAMS": str(workers)}
    threads = max(1, min(settings.thread_num * workers, len(os.sched_getaffinity(0))))
    return config | {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": str(min(workers, threads))}


def _precision(precision: str, device: str) -> str:
    hint = _PRECISIONS.get(precision.lower())
    if hint is None:
        log.warning("precision not supported, fp32 takes its place", precision=precision, device=device)
        return _PRECISIONS["fp32"]
    return hint
