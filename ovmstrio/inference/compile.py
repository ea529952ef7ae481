"""From a model's file to something that infers: read, preprocess, reshape, compile, measure."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import openvino as ov
import structlog
from openvino.passes import LowLatency2, Manager

from ovmstrio.config.mapping import NO_MAPPING, TensorMapping
from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BYTES, Dim, TensorSpec
from ovmstrio.inference.compiled import Compiled, Timing, warm_up
from ovmstrio.inference.infer_requests import Blocking, marks_of
from ovmstrio.inference.layer_times import WITH_TIMES
from ovmstrio.inference.preprocess import preprocess
from ovmstrio.inference.reading import read_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core, devices, reason
from ovmstrio.inference.shape_buckets import plan_buckets
from ovmstrio.inference.signature import ModelSignature, for_ports, port_names, read_signature, to_partial_shape
from ovmstrio.inference.tensors import read_variables
from ovmstrio.util.cores import CORES
from ovmstrio.util.placement import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    Placement,
)

__all__ = ["CALLS_AT_ONCE", "Again", "ModelFile", "compile_model", "compile_read", "reshape", "take_batches"]

# ----------------------------------------------------------------------
# Let a model take batches of every size, and see to it that each row of its inputs has one row in each output
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


def take_batches(model: ov.Model, batching: BatchingSpec, mapping: TensorMapping, file: str) -> None:
    """Make the batch dimension of each input a range up to the largest batch, unless it takes all of these already.

    Raises:
        ConfigError: a tensor has no batch dimension, the model cannot take another batch, or an output has not one row
            for each row of the inputs.
    """
    signature = read_signature(model, mapping, file)
    _refuse([_no_batch("input", tensor, file) for tensor in signature.inputs if tensor.batch_axis is None])
    rows = Dim(1, batching.max_batch_size)
    # A range of one size would tell nothing of the outputs.
    probe = Dim(1, max(batching.max_batch_size, 2))
    _reshape(model, _shapes(signature, probe, keep_open=False), file)
    _check_outputs(read_signature(model, mapping, file), probe, file)
    _reshape(model, _shapes(signature, rows, keep_open=True), file)


def _shapes(signature: ModelSignature, rows: Dim, *, keep_open: bool) -> dict[int, tuple[Dim, ...]]:
    shapes: dict[int, tuple[Dim, ...]] = {}
    for port, tensor in zip(signature.input_ports, signature.inputs, strict=True):
        axis = tensor.batch_axis or 0
        own = tensor.shape[axis]
        kept = keep_open and own.accepts(rows.low) and own.accepts(rows.high)
        shapes[port] = (*tensor.shape[:axis], own if kept else rows, *tensor.shape[axis + 1 :])
    return shapes


def _reshape(model: ov.Model, shapes: Mapping[int, tuple[Dim, ...]], file: str) -> None:
    try:
        model.reshape({model.inputs[port]: to_partial_shape(dims) for port, dims in shapes.items()})
    except OPENVINO_ERRORS as error:
        message = f"the model cannot take batches of another size: {reason(error)}"
        _refuse([Problem(message, file=file, path="batching", suggestion="leave batching out")])


def _check_outputs(signature: ModelSignature, rows: Dim, file: str) -> None:
    problems: list[Problem] = []
    for tensor in signature.outputs:
        if tensor.batch_axis is None:
            problems.append(_no_batch("output", tensor, file))
            continue
        found = tensor.shape[tensor.batch_axis]
        if found.high == -1:
            log.warning("rows of an output are known at run time only", output=tensor.name, file=file)
        elif found != rows:
            message = f"output {tensor.name!r} has not one row for each row of the inputs"
            expected, suggestion = f"{rows} rows for {rows} rows of input", "leave batching out"
            problems.append(Problem(message, file, None, "batching", expected, str(tensor), suggestion))
    _refuse(problems)


def _no_batch(side: str, tensor: TensorSpec, file: str) -> Problem:
    message = f"{side} {tensor.name!r} has no batch dimension"
    suggestion = "set a layout with N, or leave batching out"
    return Problem(message, file, None, "batching", "a batch dimension", str(tensor), suggestion)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


# ----------------------------------------------------------------------
# Bring a model to the batch size and shapes that its configuration, or a request, asks for
# ----------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]


def reshape(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, requested: Shapes, file: str) -> None:
    """Give the model's inputs the shapes of ``spec``, and over these the shapes ``requested`` by name.

    Raises:
        ConfigError: a name is unknown, or the model cannot take the shapes.
    """
    wanted = _configured(model, spec, mapping, file)
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    for name, sizes in requested.items():
        wanted[names.index(name)] = tuple(Dim.fixed(size) for size in sizes)
    if not wanted:
        return
    try:
        model.reshape({model.inputs[index]: to_partial_shape(dims) for index, dims in wanted.items()})
    except OPENVINO_ERRORS as error:
        shapes = ", ".join(f"{names[index]}: ({','.join(map(str, dims))})" for index, dims in wanted.items())
        problem = Problem(f"the model cannot take the shapes {shapes}: {reason(error)}", file=file, path="shape")
        raise ConfigError([problem]) from error


def _configured(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, file: str) -> dict[int, tuple[Dim, ...]]:
    """Find the shapes that the configuration asks for, by position; ``auto`` leaves the model's own until a request."""
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    everywhere = "" in spec.shapes and spec.shapes[""].auto
    shapes = for_ports("shape", spec.shapes, names, mapping.inputs, origin=spec.origin, anonymous_everywhere=everywhere)
    if shapes:
        if spec.batch is not None:
            log.warning("batch size ignored, because a shape is set", model=spec.name)
        return {index: shape.dims for index, shape in shapes.items() if shape.dims is not None}
    if spec.batch is None or spec.batch.dim is None:
        return {}
    return _batched(read_signature(model, mapping, file), spec.batch.dim, spec, file)


def _batched(signature: ModelSignature, batch: Dim, spec: ModelSpec, file: str) -> dict[int, tuple[Dim, ...]]:
    wanted: dict[int, tuple[Dim, ...]] = {}
    for port, tensor in zip(signature.input_ports, signature.inputs, strict=True):
        axis = tensor.batch_axis
        if axis is not None and axis < len(tensor.shape):
            wanted[port] = (*tensor.shape[:axis], batch, *tensor.shape[axis + 1 :])
    if not wanted:
        message = f"batch_size is set, but no input of {spec.name!r} has a batch dimension"
        raise ConfigError(
            [Problem(message, file=file, path="batch_size", suggestion="set a layout with N, or a shape")]
        )
    return wanted


# ----------------------------------------------------------------------
# A model compiled once more, for more or fewer calls at once, or because it has other neighbours on the cores
# ----------------------------------------------------------------------

CALLS_AT_ONCE: Final = "PERFORMANCE_HINT_NUM_REQUESTS"


@dataclass(frozen=True, slots=True)
class Again:
    """Compiles a model for so many calls at once; what it gives can be compiled anew in the same way.

    Attributes:
        build: compiles the model with settings, and runs it, so that no request waits for what a first run makes.
        config: its settings, for all cores.
        on_loop: those of one thread, if the event loop infers on a model of its own.
        may_share_out: whether the server may choose how many inferences share the cores out.
        is_for_loop: whether it is nothing but the one of one thread, for 0 calls at once.
    """

    build: Callable[[Mapping[str, str]], Compiled]
    config: Mapping[str, str]
    on_loop: Mapping[str, str] | None = None
    may_share_out: bool = False
    is_for_loop: bool = False

    def __call__(self, at_once: int) -> Compiled:
        """Compile it, and run it.  Blocks for as long as that takes.

        Raises:
            ConfigError: the device cannot compile it.
        """
        if self.on_loop is None:
            return self.of(self._for_all_cores(at_once))
        loop = self.build(self.on_loop)
        return self.of(self._for_all_cores(at_once).with_loop(loop) if at_once else loop)

    def of(self, compiled: Compiled) -> Compiled:
        """Give a model that is compiled anew in this way."""
        return replace(
            compiled, chosen_anew=self, may_share_out=self.may_share_out, is_for_loop=self.is_for_loop
        )  # fmt: skip

    def _for_all_cores(self, at_once: int) -> Compiled:
        side_by_side = {"PERFORMANCE_HINT": "THROUGHPUT", CALLS_AT_ONCE: str(at_once)} if at_once > 1 else {}
        return self.build({**self.config, **side_by_side})


# ----------------------------------------------------------------------
# From a model's file to something that infers: read, preprocess, reshape, compile, measure
# ----------------------------------------------------------------------

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
