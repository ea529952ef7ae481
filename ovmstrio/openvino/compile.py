"""From a model's file to something that infers: read, preprocess, reshape, compile, measure."""

from __future__ import annotations

import difflib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import openvino as ov
import structlog
from openvino.passes import LowLatency2, Manager

from ovmstrio.config.mapping import NO_MAPPING, TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.openvino.batch_ranges import take_batches
from ovmstrio.openvino.model_state import read_variables
from ovmstrio.openvino.ov_tensors import placeholder
from ovmstrio.openvino.pool import Slot
from ovmstrio.openvino.preprocess import preprocess
from ovmstrio.openvino.reading import read_model
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core, devices, reason
from ovmstrio.openvino.shaping import reshape
from ovmstrio.openvino.signature import ModelSignature, read_signature
from ovmstrio.work.placement import Placement

__all__ = ["Compiled", "ModelFile", "Timing", "compile_model", "compile_read", "warm_up"]

log = structlog.get_logger(__name__)

SMALL_WEIGHT_BYTES: Final = 8 * 2**20
SMALL_OPERATIONS: Final = 2_000
"""Models within both bounds are first compiled for one thread and timed; larger ones can never run inline."""

_USER_DECIDES: Final = {"PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "NUM_STREAMS"}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What to load: the file, how it was configured, and the shapes that a request asked for, by input name."""

    file: Path
    spec: ModelSpec
    mapping: TensorMapping = NO_MAPPING
    requested: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled model with what is known of it.

    ``may_fail`` tells that shapes inside are found out at run time only, so that a valid request may fail.  Then
    ``models`` are as many as there are streams, of one stream each, and each may run one request at a time: in
    OpenVINO 2026.4 a failure leaves a stream in a state in which others' requests fail or get wrong numbers, until it
    is mended, so nothing may run on it before that.  Otherwise there is one model, for ``nireq`` requests.
    ``variables`` is what a stateful model remembers, empty for others.
    ``compile_again`` makes another like them; ``synchronous`` is as in :class:`~ovmstrio.openvino.pool.Slot`.
    """

    models: tuple[ov.CompiledModel, ...]
    compile_again: Callable[[], ov.CompiledModel]
    signature: ModelSignature
    placement: Placement
    timing: Timing | None
    nireq: int
    streams: int
    may_fail: bool
    synchronous: bool
    variables: tuple[TensorSpec, ...] = ()

    def make_slot(self, number: int = 0) -> Slot:
        """Make an infer request of one of the models."""
        return Slot(self.models[number], self.signature, synchronous=self.synchronous)

    def make_slots(self) -> list[Slot]:
        """Make as many infer requests as may run at once."""
        return [self.make_slot(number if self.may_fail else 0) for number in range(self.nireq)]


def compile_model(source: ModelFile) -> Compiled:
    """Load and compile a model and time its first inferences.  Blocks for as long as that takes.

    A small model whose user chose no threads, streams or hint is compiled for latency on one thread, if all shapes
    inside are known.  It stays so if its inferences are then short enough for the event loop; otherwise it is
    compiled again like a large one.

    Raises:
        ConfigError: the file cannot be read, a setting does not fit it, or the device cannot compile it; the
            message gives the file and OpenVINO's own reason.
    """
    return compile_read(read_model(source.file), source)


def compile_read(model: ov.Model, source: ModelFile) -> Compiled:
    """Compile a model that was read already, and changes it; as :func:`compile_model` otherwise."""
    spec, file = source.spec, str(source.file)
    model = preprocess(model, spec, source.mapping)
    reshape(model, spec, source.mapping, source.requested, file)
    if spec.batching is not None:
        take_batches(model, spec.batching, source.mapping, file)
    signature = read_signature(model, source.mapping, file)
    if spec.low_latency_transformation:
        _keep_loop_state(model, file)
    variables = read_variables(model, file) if spec.stateful else ()
    config = _config(source)
    build = partial(_build, model, source, signature, variables)
    if _is_small(model) and not model.is_dynamic() and not _USER_DECIDES & config.keys():
        compiled = build({**config, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"})
        if compiled.placement.is_inline(0):
            return compiled
    return build(config)


def _keep_loop_state(model: ov.Model, file: str) -> None:
    """Unroll loops of one step, and make variables of what they pass from step to step."""
    manager = Manager()
    manager.register_pass(LowLatency2())
    try:
        manager.run_passes(model)
    except OPENVINO_ERRORS as error:
        message = f"the low latency transformation fails: {reason(error)}"
        raise ConfigError([Problem(message, file=file, path="low_latency_transformation")]) from error


def _is_small(model: ov.Model) -> bool:
    operations = model.get_ops()
    if len(operations) > SMALL_OPERATIONS:
        return False
    weights = sum(node.get_byte_size() for node in operations if node.get_type_name() == "Constant")
    return bool(weights <= SMALL_WEIGHT_BYTES)


def _config(source: ModelFile) -> dict[str, str]:
    spec = source.spec
    config = dict(spec.plugin_config)
    follows_requests = any(shape.auto for shape in spec.shapes.values()) or (spec.batch is not None and spec.batch.auto)
    if spec.cache_dir is not None and (spec.allow_cache or not follows_requests):
        config.setdefault("CACHE_DIR", str(spec.cache_dir))
    return config


def _compile(model: ov.Model, source: ModelFile, config: dict[str, str]) -> ov.CompiledModel:
    if not {"NUM_STREAMS", "PERFORMANCE_HINT"} & config.keys():
        config = {**config, "PERFORMANCE_HINT": "LATENCY"}
    try:
        return core().compile_model(model, source.spec.target_device, config)
    except OPENVINO_ERRORS as error:
        raise ConfigError([_cannot_compile(source, error)]) from error


def _cannot_compile(source: ModelFile, error: BaseException) -> Problem:
    spec, text = source.spec, reason(error)
    path = suggestion = ""
    if spec.target_device.split(":")[0] not in {*devices(), "AUTO", "MULTI", "HETERO", "BATCH"}:
        path, suggestion = "target_device", f"devices here: {', '.join(devices())}"
    elif "Unsupported property" in text:
        path = "plugin_config"
        known = list(core().get_property(spec.target_device, "SUPPORTED_PROPERTIES"))
        unknown = sorted(set(spec.plugin_config) - set(known))
        close = difflib.get_close_matches(unknown[0], known, 1, 0.5) if unknown else []
        suggestion = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    message = f"Cannot compile model into target device - {spec.target_device}: {text}"
    return Problem(message, file=str(source.file), path=path, suggestion=suggestion)


def _build(
    model: ov.Model,
    source: ModelFile,
    signature: ModelSignature,
    variables: tuple[TensorSpec, ...],
    config: dict[str, str],
) -> Compiled:
    compile_again = partial(_compile, model, source, config)
    models = (compile_again(),)
    streams = _property(models[0], "NUM_STREAMS", 1)
    may_fail = bool(model.is_dynamic())
    if may_fail and streams > 1 and source.spec.target_device == "CPU":
        threads = _property(models[0], "INFERENCE_NUM_THREADS", streams)
        compile_again = partial(_compile, model, source, _one_stream(config, max(1, threads // streams)))
        models = tuple(compile_again() for _ in range(streams))
    synchronous = not may_fail or _property(models[0], "INFERENCE_NUM_THREADS", 1) > 1
    timing = warm_up(models[0], signature, synchronous=synchronous)
    if timing is None:
        models = (compile_again(), *models[1:])
    placement = Placement.away()
    grows = any(not dim.is_fixed for variable in variables for dim in variable.shape) or signature.depends_on_values
    if timing is not None and synchronous and _is_small(model) and not grows:
        fixed = signature.has_fixed_inputs
        placement = Placement.measured(timing.median_seconds, timing.input_bytes, fixed_shape=fixed)
    nireq = source.spec.nireq or _property(models[0], "OPTIMAL_NUMBER_OF_INFER_REQUESTS", 1)
    if may_fail:
        nireq = len(models)
    return Compiled(
        models, compile_again, signature, placement, timing, nireq, streams, may_fail, synchronous, variables
    )


def _one_stream(config: dict[str, str], threads: int) -> dict[str, str]:
    """Give the settings for a model that has one of several streams to itself; pinned, they would share cores."""
    ours = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads), "ENABLE_CPU_PINNING": "NO"}
    return {name: value for name, value in config.items() if not name.startswith("PERFORMANCE_HINT")} | ours


def _property(model: ov.CompiledModel, name: str, default: int) -> int:
    try:
        return int(model.get_property(name))
    except OPENVINO_ERRORS:  # devices such as AUTO do not have every property
        return default


_TIMED_RUNS: Final = 15
_LONG_ENOUGH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """What one inference took on so many bytes of input."""

    median_seconds: float
    input_bytes: int


def warm_up(model: ov.CompiledModel, signature: ModelSignature, *, synchronous: bool) -> Timing | None:
    """Time inferences on ones, dynamic dimensions being 1.

    Gives None if the model cannot run on such inputs; it is then not fit for use any more.  The first run is not
    counted, as it allocates; a model for which one run is long is run twice only.  ``synchronous`` is as in
    :class:`~ovmstrio.openvino.pool.Slot`.
    """
    arrays = [placeholder(spec) for spec in signature.inputs]
    slot = Slot(model, signature, synchronous=synchronous)
    times: list[float] = []
    try:
        slot.bind(arrays)
        slot.infer()
        while len(times) < _TIMED_RUNS and sum(times) < _LONG_ENOUGH_SECONDS:
            begin = time.perf_counter()
            slot.infer()
            times.append(time.perf_counter() - begin)
    except ModelFailure as error:
        log.info("warm-up skipped: the model does not run on ones", reason=error.message)
        return None
    return Timing(statistics.median(times), sum(array.nbytes for array in arrays))
