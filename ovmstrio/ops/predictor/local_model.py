"""Local Paddle models: alias mapping, loading, devices and OpenVINO settings, and the predictor of scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, FailedPrecondition, Problem
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compile import ModelFile, compile_loaded
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import ProbeModel, probe_model_from_thread
from ovmstrio.inference.model_readers import read_paddle
from ovmstrio.inference.network import BlockingNetwork
from ovmstrio.inference.runtime import available_devices
from ovmstrio.inference.signature import ModelSignature, port_names
from ovmstrio.ops.predictor.model_config import ModelConfig, Variable, check, check_fetch, prepare, read_model_config
from ovmstrio.ops.predictor.protocol import Feed
from ovmstrio.ops.settings import LocalServiceConf

# ----------------------------------------------------------------------
# Local Paddle models: alias mapping, loading, device selection and OpenVINO settings
# ----------------------------------------------------------------------

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
TENSORRT: Final = 2
TENSORRT_REPLACED: Final = "TensorRT is not supported, OpenVINO's GPU plugin takes its place"
_DEVICE_TYPES: Final = "-1 (as 'devices' says), 0 and 3 (CPU), 1 and 2 (GPU)"
_PRECISIONS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def select_device(settings: LocalServiceConf, worker: int) -> str:
    """Return a worker's device, round-robin over ``available_devices``; the CPU if the GPU is missing."""
    number = _gpu_number(settings, worker)
    if number is None:
        return _CPU
    device = _find_gpu(number)
    if device == _CPU:
        log.warning("GPU not found, using CPU", wanted=f"GPU.{number}", devices=available_devices(), worker=worker)
    return device


def _gpu_number(settings: LocalServiceConf, worker: int) -> str | None:
    """Return the number of the GPU that a worker should use; None for the CPU."""
    kind, numbers = settings.device_type, settings.device_ids
    if kind not in {_BY_DEVICES, *_ON_CPU, *_ON_GPU}:
        message = "unsupported device type"
        raise ConfigError([Problem(message, path="device_type", expected=_DEVICE_TYPES, found=str(kind))])
    if not all(number.isdecimal() for number in numbers):
        expected, found = "comma-separated numbers", repr(settings.devices)
        raise ConfigError([Problem("malformed list of devices", path="devices", expected=expected, found=found)])
    if kind in _ON_CPU or not (numbers or kind in _ON_GPU):
        return None
    return numbers[worker % len(numbers)] if numbers else "0"


def _find_gpu(number: str) -> str:
    """Return OpenVINO's name of a GPU; the CPU if there is no such GPU."""
    names = (f"GPU.{number}", *(["GPU"] if number == "0" else []))
    return next((name for name in names if name in available_devices()), _CPU)


def replaced_settings(settings: LocalServiceConf, workers: int) -> list[Problem]:
    """Return a warning for each setting that others replace: TensorRT, missing GPUs and unsupported precisions.

    Raises ConfigError for unsupported devices.
    """
    problems = []
    wanted = {number for worker in range(workers) if (number := _gpu_number(settings, worker)) is not None}
    missing = [number for number in sorted(wanted, key=int) if _find_gpu(number) == _CPU]
    if settings.device_type == TENSORRT:
        problems.append(Problem(TENSORRT_REPLACED, path="device_type", suggestion="write device_type: 1"))
    if missing:
        message = f"GPU {', '.join(missing)} not found, the CPU is used"
        path = "devices" if settings.device_ids else "device_type"
        problems.append(Problem(message, path=path, suggestion=f"available devices: {', '.join(available_devices())}"))
    if settings.precision.lower() not in _PRECISIONS:
        expected = ", ".join(_PRECISIONS)
        message = "precision not supported, fp32 is used"
        problems.append(Problem(message, path="precision", expected=expected, found=settings.precision))
    return [replace(problem, severity="warning") for problem in problems]


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


# ----------------------------------------------------------------------
# LocalPredictor: thread-safe predictor that services and scripts create
# ----------------------------------------------------------------------

_UNSUPPORTED_OPTIONS = ("use_trt", "use_lite", "use_xpu", "use_ascend_cl", "use_calib")


class LocalPredictor:
    """Predictor of a local Paddle model.

    Attributes:
        feed_names_: input aliases.
        fetch_names_: output aliases.
        feed_types_: element type numbers by input alias.
        fetch_types_: element type numbers by output alias.
        feed_shapes_: sample shapes by input alias.
        feed_names_to_idx_: positions by input alias.
    """

    def __init__(self) -> None:
        self.feed_names_: list[str] = []
        self.fetch_names_: list[str] = []
        self.feed_types_: dict[str, int] = {}
        self.fetch_types_: dict[str, int] = {}
        self.feed_shapes_: dict[str, list[int]] = {}
        self.feed_names_to_idx_: dict[str, int] = {}
        self._model: LocalModel | None = None
        self._network: BlockingNetwork | None = None

    def load_model_config(  # noqa: PLR0917 - the signature that scripts call
        self,
        model_path: str,
        use_gpu: bool = False,  # noqa: FBT002 - as callers know it
        gpu_id: int = 0,
        use_profile: bool = False,  # noqa: FBT002 - as callers know it
        thread_num: int = 1,
        mem_optim: bool = True,  # noqa: FBT002 - as callers know it
        ir_optim: bool = False,  # noqa: FBT002 - as callers know it
        use_trt: bool = False,  # noqa: FBT002 - as callers know it
        use_lite: bool = False,  # noqa: FBT002 - as callers know it
        use_xpu: bool = False,  # noqa: FBT002 - as callers know it
        precision: str = "fp32",
        use_mkldnn: bool = False,  # noqa: FBT002 - as callers know it
        mkldnn_cache_capacity: int = 0,
        mkldnn_op_list: Sequence[str] | None = None,
        mkldnn_bf16_op_list: Sequence[str] | None = None,
        use_feed_fetch_ops: bool = False,  # noqa: FBT002 - as callers know it
        use_ascend_cl: bool = False,  # noqa: FBT002 - as callers know it
        min_subgraph_size: int = 3,
        dynamic_shape_info: Mapping[str, Any] | None = None,
        use_calib: bool = False,  # noqa: FBT002 - as callers know it
    ) -> None:
        """Load the model of a folder; options without meaning for OpenVINO are ignored.

        Raises:
            ConfigError: the folder has no supported model.
            NotReady: the crash probe of the server failed.
        """
        given = locals()
        ignored = [name for name in _UNSUPPORTED_OPTIONS if given[name]]
        if ignored:
            log.warning("settings of unsupported devices ignored", settings=ignored, model=model_path)
        settings = LocalServiceConf(
            device_type=1 if use_gpu else 0, devices=str(gpu_id), thread_num=thread_num, precision=precision
        )
        device = select_device(settings, 0)
        wanted = (Path(model_path), device, plugin_config(settings, device, 1))
        probe_model_from_thread(local_crash_probe(*wanted))
        self._set_model(*load_local_model(*wanted))

    def _set_model(self, model: LocalModel, compiled: Compiled) -> None:
        feeds, fetches = model.config.feeds, model.config.fetches
        self.feed_names_, self.fetch_names_ = model.feed_names, model.fetch_names
        self.feed_types_ = {variable.alias: variable.kind for variable in feeds}
        self.fetch_types_ = {variable.alias: variable.kind for variable in fetches}
        self.feed_shapes_ = {variable.alias: list(variable.shape) for variable in feeds}
        self.feed_names_to_idx_ = {variable.alias: position for position, variable in enumerate(feeds)}
        self._model, self._network = model, BlockingNetwork(compiled)

    def predict(
        self,
        feed: Mapping[str, Any],
        fetch: str | Sequence[str] | None = None,
        batch: bool = False,  # noqa: FBT002 - the signature that scripts call
        log_id: int = 0,  # noqa: ARG002 - the same
    ) -> dict[str, Array]:
        """Run the model; thread-safe.

        Args:
            feed: arrays or lists of numbers by alias; lists are reshaped to the declared shape.
            fetch: requested output aliases; all if empty.
            batch: whether values have a batch axis; otherwise they are one sample.
            log_id: ignored.

        Raises:
            FailedPrecondition: no model is loaded.
            FeedMismatch: names or shapes do not match the model.
            FeedTypeError: a value has an unsupported type.
            ModelFailure: the model failed.
        """
        model, network = self._model, self._network
        if model is None or network is None:
            raise FailedPrecondition("no model is loaded: call load_model_config first")
        wanted = model.wanted([fetch] if isinstance(fetch, str) else fetch)
        declared = {variable.alias: variable for variable in model.config.feeds}
        arrays = {name: _array(value, declared.get(name), batch=batch) for name, value in feed.items()}
        return model.answer(network.infer(model.arrays(arrays, batch=batch)), wanted)


def _array(value: Any, variable: Variable | None, *, batch: bool) -> Any:
    """Convert lists of numbers to an array of the declared shape; other values are checked later."""
    if not isinstance(value, list | tuple | int | float) or variable is None or _has_text(value):
        return value
    try:
        array = np.asarray(value, variable.dtype)
        return array.reshape((-1, *variable.shape) if batch else variable.shape)
    except (TypeError, ValueError):
        return value


def _has_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, str) for each in value)
