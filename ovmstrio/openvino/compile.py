"""From a model's file to something that infers: read, preprocess, reshape, compile, measure."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import openvino as ov
import structlog
from openvino.passes import LowLatency2, Manager

from ovmstrio.config.mapping import NO_MAPPING, TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.openvino.batch_ranges import take_batches
from ovmstrio.openvino.bucket_plan import plan_buckets
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.compiling_anew import CALLS_AT_ONCE, Again
from ovmstrio.openvino.first_runs import Timing, warm_up
from ovmstrio.openvino.layer_clock import WITH_TIMES
from ovmstrio.openvino.model_state import read_variables
from ovmstrio.openvino.preprocess import preprocess
from ovmstrio.openvino.reading import read_model
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core, devices, reason
from ovmstrio.openvino.shaping import reshape
from ovmstrio.openvino.signature import ModelSignature, read_signature
from ovmstrio.openvino.slot import Blocking, marks_of
from ovmstrio.work.cores import CORES
from ovmstrio.work.placement import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    Placement,
)

__all__ = ["ModelFile", "compile_model", "compile_read"]

log = structlog.get_logger(__name__)

SMALL_WEIGHT_BYTES: Final = 8 * 2**20
SMALL_OPERATIONS: Final = 2_000
"""Models within both bounds are first compiled for one thread and timed."""

_MOST_ON_FEW_CORES_SECONDS: Final = 350e-6
"""What a run of a model of one thread may take while it loads on few cores, for it to stay one.

A lone call is answered sooner by several threads from there on (benchmarks/RESULTS.md).
"""

_MANY_OPERATIONS: Final = 100
"""Models of fewer are compiled in the time that reading the result takes (docs/compiled_files.md)."""

_USER_DECIDES: Final = {"INFERENCE_NUM_THREADS", "NUM_STREAMS"}
LATENCY: Final = "LATENCY"
PINNING: Final = "ENABLE_CPU_PINNING"
_ON_LOOP: Final = {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": LATENCY}
_UNBOUND: Final = {PINNING: "NO"}
"""OpenVINO binds the thread that infers, which is the event loop's here, to one core for the time of each inference:
the loop would have to move there, and to wait where somebody else has that core, though another one is free."""
_CACHED_SHAPES: Final = {"CPU_RUNTIME_CACHE_CAPACITY": "256"}
"""What a stream keeps of shapes that it has seen, an entry for each operation and shape.  OpenVINO's own 5,000 are
without end for requests of ever other shapes, and save nothing that can be measured (docs/memory.md)."""
_SPARE: Final = 2
"""Requests for each that OpenVINO can run at once: one more waits in its queue, so that the device never does."""
_MANY: Final = 8
"""The same of short inferences with small tensors, whose ends the event loop hears of several at a time."""
_SHORT_SECONDS: Final = 3e-3
_SMALL_TENSORS_BYTES: Final = 64 * 2**10


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What to load: the file, how it was configured, and the shapes that a request asked for, by input name.

    ``labels`` name the classes of its outputs; ``kept`` is where what it compiles to may be, if its user has named no
    place for that.
    """

    file: Path
    spec: ModelSpec
    mapping: TensorMapping = NO_MAPPING
    requested: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    kept: Path | None = None


def compile_model(source: ModelFile) -> Compiled:
    """Load and compile a model and time its first inferences.  Blocks for as long as that takes.

    A small model whose user chose no threads or streams, and no other hint than latency, is compiled for latency on one
    thread.  It stays so if its inferences are then short enough for the event loop; otherwise it is compiled again like
    a large one.

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
    buckets = plan_buckets(model, spec, source.mapping, file)
    return replace(_compile_shaped(model, source), buckets=buckets)


def _compile_shaped(model: ov.Model, source: ModelFile) -> Compiled:
    """Compile a model that has its shapes, for one thread first if it is small."""
    spec, file = source.spec, str(source.file)
    signature = read_signature(model, source.mapping, file)
    if spec.low_latency_transformation:
        _keep_loop_state(model, file)
    variables = read_variables(model, file) if spec.stateful else ()
    config = _config(source, model)
    build = partial(_build, model, source, signature, variables)
    if _is_small(model) and not _USER_DECIDES & config.keys() and config.get("PERFORMANCE_HINT", LATENCY) == LATENCY:
        unbound = _UNBOUND if spec.target_device == "CPU" else {}
        on_loop = {**unbound, **config, **_ON_LOOP}
        compiled = build(on_loop)
        if _is_for_loop(compiled):
            return _that_may_leave_loop(compiled, model, source, Again(build, config, on_loop, is_for_loop=True))
    return _with_loop(build(config), model, source, Again(build, config, _one_stream(config, 1)))


def _is_for_loop(compiled: Compiled) -> bool:
    """Tell whether a model of one thread is short enough to stay one, by its shortest run.

    All others that load, and the server that starts, can only make it longer: on few cores up to three times.
    """
    most = _MOST_ON_FEW_CORES_SECONDS if CORES.are_few else INLINE_THRESHOLD_SECONDS
    timing = compiled.timing
    return timing is not None and timing.least_seconds < most and compiled.placement.is_inline(timing.input_bytes)


def _that_may_leave_loop(compiled: Compiled, model: ov.Model, source: ModelFile, again: Again) -> Compiled:
    """Have a model that is made for the event loop become one for all cores if it is asked for what takes long."""
    if CORES.count == 1 or source.spec.target_device != "CPU" or _remembers(model, source):
        return compiled
    may_share_out = _may_share_out(model, source, source.spec.plugin_config, CORES.count)
    return replace(again, may_share_out=may_share_out).of(compiled)


def _with_loop(compiled: Compiled, model: ov.Model, source: ModelFile, again: Again) -> Compiled:
    """Give a small model of several streams one thread for the event loop as well, if it is short enough for that.

    Each of several streams has a thread of its own, to which the loop would hand over what takes less than that.
    """
    is_left = compiled.streams > 1 and source.spec.target_device == "CPU" and not _remembers(model, source)
    if not is_left or compiled.timing is None or again.on_loop is None or not _is_small(model):
        return compiled
    try:
        loop = again.build(again.on_loop)
    except ConfigError as error:
        log.info("the event loop gets no model of its own", reason=str(error))
        return compiled
    if not _is_for_loop(loop):
        return compiled
    return replace(again, may_share_out=compiled.may_share_out).of(compiled.with_loop(loop))


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
    return _weight_bytes(operations) <= SMALL_WEIGHT_BYTES


def _weight_bytes(operations: Iterable[ov.Node]) -> int:
    return sum(int(node.get_byte_size()) for node in operations if node.get_type_name() == "Constant")


def _config(source: ModelFile, model: ov.Model) -> dict[str, str]:
    spec = source.spec
    config = dict(spec.plugin_config)
    follows_requests = any(shape.auto for shape in spec.shapes.values()) or (spec.batch is not None and spec.batch.auto)
    if spec.cache_dir is not None and (spec.allow_cache or not follows_requests):
        config.setdefault("CACHE_DIR", str(spec.cache_dir))
    elif source.kept is not None and not follows_requests and len(model.get_ops()) >= _MANY_OPERATIONS:
        config.setdefault("CACHE_DIR", str(source.kept))
    return config


def _compile(model: ov.Model, source: ModelFile, config: Mapping[str, str]) -> ov.CompiledModel:
    if not {"NUM_STREAMS", "PERFORMANCE_HINT"} & config.keys():
        config = {**config, "PERFORMANCE_HINT": LATENCY}
    if source.kept is not None and not source.kept.is_dir():
        config = {name: value for name, value in config.items() if value != str(source.kept)}
    if source.spec.target_device == "CPU":
        config = {**(_CACHED_SHAPES if model.is_dynamic() else {}), **_core_share(), **config}
    try:
        return core().compile_model(model, source.spec.target_device, config)
    except OPENVINO_ERRORS as error:
        raise ConfigError([_cannot_compile(source, error)]) from error


def _core_share() -> dict[str, str]:
    """Give the settings of a model that has not all cores for itself; pinned, every one would have the same ones.

    Threads that are not pinned go where there is room, and OpenVINO has no more of them in a process, beside one for
    each stream, than there are cores, so that all models of a process may ask for as many.
    """
    threads = {} if CORES.processes == 1 else {"INFERENCE_NUM_THREADS": str(CORES.count)}
    return threads | ({PINNING: "NO"} if CORES.is_shared else {})


def _is_pinned(
    compiled: ov.CompiledModel, model: ov.Model, source: ModelFile, config: Mapping[str, str], *, was_shared: bool
) -> bool | None:
    """Tell whether its threads are bound to cores; None where nothing is to be chosen.

    That is where the user has chosen, where OpenVINO binds nothing by itself, and where requests remember.
    """
    if PINNING in config or source.spec.target_device != "CPU" or _remembers(model, source):
        return None
    is_bound = bool(_property(compiled, PINNING, 0))
    return is_bound if is_bound or was_shared or CORES.is_shared else None


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
    config: Mapping[str, str],
) -> Compiled:
    compile_again = partial(_compile, model, source, config)
    was_shared = CORES.is_shared
    compiled = compile_again()
    streams = _property(compiled, "NUM_STREAMS", 1)
    threads = _property(compiled, "INFERENCE_NUM_THREADS", 1)
    may_fail = bool(model.is_dynamic())
    if may_fail and streams > 1:
        compile_again = partial(_compile, model, source, _one_stream(config, threads))
    isolated = partial(_isolated, model, source, _one_stream(config, max(1, threads // max(1, streams))), streams)
    blocking = Blocking.SYNCHRONOUS
    if may_fail and threads <= 1:
        is_told = source.spec.target_device == "CPU" and marks_of(signature) is not None
        blocking = Blocking.MARKED if is_told else Blocking.QUEUED
    if any(spec.datatype is BYTES for spec in signature.outputs):
        blocking = Blocking.QUEUED  # The synchronous call reads outputs; of strings it cannot read an empty tensor.
    # Others that load at the same time, on every core, do not show on the clock of a thread that does all the work.
    alone = threads <= 1 and blocking is not Blocking.QUEUED
    timing = warm_up(compiled, signature, blocking, time.thread_time if alone else time.perf_counter)
    if timing is None:
        # A stream that has failed may not be believed any more; those of a new model have not.
        compiled = _compile(model, source, config)
    placement = Placement.away()
    grows = any(not dim.is_fixed for variable in variables for dim in variable.shape) or signature.depends_on_values
    limit = FILLING_THRESHOLD_SECONDS if _fills_few_cores(compiled, streams, threads) else None
    if timing is not None and (limit is not None or _is_small(model)) and not grows:
        most = FEW_CORES_THRESHOLD_SECONDS if alone and streams == 1 and CORES.are_few else INLINE_THRESHOLD_SECONDS
        placement = Placement.measured(
            timing.least_seconds, timing.input_bytes, fixed_shape=signature.has_fixed_inputs, most=most, limit=limit
        )
    may_share_out = timing is not None and _may_share_out(model, source, config, threads)
    side_by_side = source.spec.nireq or _property(compiled, "OPTIMAL_NUMBER_OF_INFER_REQUESTS", 1)
    return Compiled(
        model=compiled,
        compile_again=compile_again,
        compile_timed=partial(_compile, model, source, {**config, **WITH_TIMES}),
        chosen_anew=Again(partial(_build, model, source, signature, variables), config, may_share_out=may_share_out),
        isolated=isolated,
        signature=signature,
        placement=placement,
        timing=timing,
        nireq=source.spec.nireq or side_by_side * _requests_each(signature, timing, placement),
        side_by_side=side_by_side,
        streams=streams,
        may_fail=may_fail,
        blocking=blocking,
        variables=variables,
        weight_bytes=_weight_bytes(model.get_ops()),
        is_pinned=_is_pinned(compiled, model, source, config, was_shared=was_shared),
        may_share_out=may_share_out,
    )


def _requests_each(signature: ModelSignature, timing: Timing | None, placement: Placement) -> int:
    """Tell how many requests a model should have for each that OpenVINO runs at once."""
    if timing is None or timing.least_seconds > _SHORT_SECONDS:
        return _SPARE
    is_inline = placement.limit is None and placement.is_inline(timing.input_bytes)
    is_small = timing.input_bytes + signature.output_bytes <= _SMALL_TENSORS_BYTES
    return _MANY if is_small and not is_inline else _SPARE


def _fills_few_cores(compiled: ov.CompiledModel, streams: int, threads: int) -> bool:
    """Tell whether one inference takes all cores of a machine that has few, so that none runs beside another.

    One whose threads are bound would bind the event loop as well.
    """
    return CORES.are_few and streams == 1 and threads >= CORES.count and not _property(compiled, PINNING, 1)


def _may_share_out(model: ov.Model, source: ModelFile, config: Mapping[str, str], threads: int) -> bool:
    """Tell whether the server may choose how many inferences share the cores out, where the user has not."""
    is_left = not (_USER_DECIDES | {"PERFORMANCE_HINT", CALLS_AT_ONCE}) & config.keys()
    return is_left and threads > 1 and source.spec.target_device == "CPU" and not _remembers(model, source)


def _remembers(model: ov.Model, source: ModelFile) -> bool:
    """Tell whether requests remember what was before without the server, so that they can be no other model's."""
    return bool(model.get_variables()) and not source.spec.stateful


def _one_stream(config: Mapping[str, str], threads: int) -> dict[str, str]:
    """Give the settings for a model that has one stream; several that are pinned would share cores."""
    ours = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads), PINNING: "NO"}
    return {name: value for name, value in config.items() if not name.startswith("PERFORMANCE_HINT")} | ours


def _isolated(
    model: ov.Model, source: ModelFile, config: Mapping[str, str], count: int
) -> tuple[ov.CompiledModel, ...]:
    return tuple(_compile(model, source, config) for _ in range(count))


def _property(model: ov.CompiledModel, name: str, default: int) -> int:
    try:
        return int(model.get_property(name))
    except OPENVINO_ERRORS:  # devices such as AUTO do not have every property
        return default
