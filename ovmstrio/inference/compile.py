"""Compilation of a model file: read, preprocess, reshape, compile and time."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import openvino as ov
import structlog
from openvino.passes import LowLatency2, Manager
from openvino.preprocess import ColorFormat, PrePostProcessor

from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.config.tensor_mapping import NO_MAPPING, TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME, BYTES, Dim, TensorSpec
from ovmstrio.inference.compiled import PROFILING_CONFIG, Compiled, Timing, warm_up
from ovmstrio.inference.infer_requests import InferMode, failure_marks
from ovmstrio.inference.model_readers import read_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, available_devices, core, openvino_error_message
from ovmstrio.inference.shape_buckets import plan_buckets
from ovmstrio.inference.signature import ModelSignature, port_names, read_signature, settings_by_port, to_partial_shape
from ovmstrio.inference.tensors import read_variables
from ovmstrio.inference.tuner import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    Placement,
)
from ovmstrio.util.cores import CORES

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------
# Preprocessing: layout, precision, colour format, mean and scale
# ----------------------------------------------------------------------

_COLORS: Final = {
    "BGR": ColorFormat.BGR,
    "RGB": ColorFormat.RGB,
    "GRAY": ColorFormat.GRAY,
    "BGRX": ColorFormat.BGRX,
    "RGBX": ColorFormat.RGBX,
    "NV12": ColorFormat.NV12_SINGLE_PLANE,
    "NV12_2": ColorFormat.NV12_TWO_PLANES,
    "I420": ColorFormat.I420_SINGLE_PLANE,
    "I420_3": ColorFormat.I420_THREE_PLANES,
}


def preprocess(model: ov.Model, spec: ModelSpec, mapping: TensorMapping) -> ov.Model:
    """Add the preprocessing of ``spec`` to a model and return it; raise ConfigError if a setting does not fit."""
    if not (spec.layouts or spec.precisions or spec.color_formats or spec.mean or spec.scale):
        return model
    _check_values(spec)
    inputs = port_names(model.inputs, mapping.inputs, is_input=True)
    outputs = port_names(model.outputs, mapping.outputs, is_input=False)
    aliases = {**mapping.inputs, **mapping.outputs}
    anonymous = {"": spec.layouts[""]} if "" in spec.layouts else {}
    layouts = settings_by_port("layout", anonymous, inputs, aliases, origin=spec.origin)
    named = {name: layout for name, layout in spec.layouts.items() if name}
    positions = settings_by_port("layout", named, [*inputs, *outputs], aliases, origin=spec.origin)
    try:
        processor = PrePostProcessor(model)
        for index, layout in {**layouts, **positions}.items():
            at_input = index < len(inputs)
            port = processor.input(index) if at_input else processor.output(index - len(inputs))
            port.tensor().set_layout(ov.Layout(layout.tensor))
            port.model().set_layout(ov.Layout(layout.model or layout.tensor))
        _convert_inputs(processor, model, spec, inputs, aliases)
        return processor.build()
    except OPENVINO_ERRORS as error:
        if isinstance(error, ConfigError):
            raise
        raise _problem(
            spec,
            f"layout, precision, color_format, mean or scale do not fit the model: {openvino_error_message(error)}",
        ) from error


def _problem(spec: ModelSpec, message: str, path: str = "", suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=spec.origin, path=path, suggestion=suggestion)])


def _check_values(spec: ModelSpec) -> None:
    for name in spec.precisions.values():
        if name not in BY_NAME or name == "BYTES":
            known = ", ".join(sorted(set(BY_NAME) - {"BYTES"}))
            raise _problem(spec, f"unknown precision {name!r}", "precision", f"known are {known}")
    for text in spec.color_formats.values():
        for color in text.split(":"):
            if color not in _COLORS:
                raise _problem(
                    spec, f"unknown color_format {color!r}", "color_format", f"known are {', '.join(_COLORS)}"
                )
    for option in ("color_formats", "mean", "scale"):
        if getattr(spec, option) and not spec.layouts:
            raise _problem(
                spec, f"{option.removesuffix('s')} needs a layout", "layout", "set layout, such as NHWC:NCHW"
            )


def _convert_inputs(
    processor: PrePostProcessor, model: ov.Model, spec: ModelSpec, inputs: list[str], aliases: dict[str, str]
) -> None:
    precisions = settings_by_port(
        "precision", spec.precisions, inputs, aliases, origin=spec.origin, anonymous_everywhere=True
    )
    for index, name in precisions.items():
        processor.input(index).tensor().set_element_type(getattr(ov.Type, BY_NAME[name].openvino))
    colors = settings_by_port(
        "color_format", spec.color_formats, inputs, aliases, origin=spec.origin, anonymous_everywhere=True
    )
    for index, text in colors.items():
        given, _, wanted = text.partition(":")
        processor.input(index).tensor().set_color_format(_COLORS[given])
        if wanted:
            processor.input(index).preprocess().convert_color(_COLORS[wanted])
    if spec.mean or spec.scale:
        for index, port in enumerate(model.inputs):
            _normalise(processor.input(index).preprocess(), port, spec)


def _normalise(steps: Any, port: Any, spec: ModelSpec) -> None:
    # Mean and scale require floating point; OpenVINO converts back to the model's type afterwards.
    steps.convert_element_type(port.get_element_type() if port.get_element_type().is_real() else ov.Type.f32)
    if spec.mean:
        steps.mean(spec.mean[0] if len(spec.mean) == 1 else list(spec.mean))
    if spec.scale:
        steps.scale(spec.scale[0] if len(spec.scale) == 1 else list(spec.scale))


# ----------------------------------------------------------------------
# Dynamic batch
# ----------------------------------------------------------------------


def enable_dynamic_batch(model: ov.Model, batching: BatchingSpec, mapping: TensorMapping, file: str) -> None:
    """Reshape the batch dimension of each input to 1..``max_batch_size``, unless it already accepts that range.

    Raises:
        ConfigError: a tensor has no batch dimension, the model rejects the shape, or output and input rows differ.
    """
    signature = read_signature(model, mapping, file)
    _raise_problems([_missing_batch("input", tensor, file) for tensor in signature.inputs if tensor.batch_axis is None])
    rows = Dim(1, batching.max_batch_size)
    # With a range of one size, any output of one row would pass the check.
    probe = Dim(1, max(batching.max_batch_size, 2))
    _reshape(model, _shapes(signature, probe, keep_open=False), file)
    _check_outputs(read_signature(model, mapping, file), probe, file)
    _reshape(model, _shapes(signature, rows, keep_open=True), file)


def _shapes(signature: ModelSignature, rows: Dim, *, keep_open: bool) -> dict[int, tuple[Dim, ...]]:
    shapes: dict[int, tuple[Dim, ...]] = {}
    for port, tensor in zip(signature.input_ports, signature.inputs, strict=True):
        axis = tensor.batch_axis or 0
        dim = tensor.shape[axis]
        kept = keep_open and dim.accepts(rows.low) and dim.accepts(rows.high)
        shapes[port] = (*tensor.shape[:axis], dim if kept else rows, *tensor.shape[axis + 1 :])
    return shapes


def _reshape(model: ov.Model, shapes: Mapping[int, tuple[Dim, ...]], file: str) -> None:
    try:
        model.reshape({model.inputs[port]: to_partial_shape(dims) for port, dims in shapes.items()})
    except OPENVINO_ERRORS as error:
        message = f"the model does not accept another batch size: {openvino_error_message(error)}"
        _raise_problems([Problem(message, file=file, path="batching", suggestion="leave batching out")])


def _check_outputs(signature: ModelSignature, rows: Dim, file: str) -> None:
    problems: list[Problem] = []
    for tensor in signature.outputs:
        if tensor.batch_axis is None:
            problems.append(_missing_batch("output", tensor, file))
            continue
        found = tensor.shape[tensor.batch_axis]
        if found.high == -1:
            log.warning("output row count not known before run time", output=tensor.name, file=file)
        elif found != rows:
            message = f"output {tensor.name!r} does not have one row per input row"
            expected, suggestion = f"{rows} rows for {rows} rows of input", "leave batching out"
            problems.append(Problem(message, file, None, "batching", expected, str(tensor), suggestion))
    _raise_problems(problems)


def _missing_batch(side: str, tensor: TensorSpec, file: str) -> Problem:
    message = f"{side} {tensor.name!r} has no batch dimension"
    suggestion = "set a layout with N, or leave batching out"
    return Problem(message, file, None, "batching", "a batch dimension", str(tensor), suggestion)


def _raise_problems(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


# ----------------------------------------------------------------------
# Reshape
# ----------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]


def reshape(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, requested: Shapes, file: str) -> None:
    """Set the input shapes from ``spec``, overridden by the shapes ``requested`` by input name.

    Raises:
        ConfigError: a name is unknown, or the model rejects the shapes.
    """
    wanted = _spec_shapes(model, spec, mapping, file)
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    for name, sizes in requested.items():
        wanted[names.index(name)] = tuple(Dim.fixed(size) for size in sizes)
    if not wanted:
        return
    try:
        model.reshape({model.inputs[index]: to_partial_shape(dims) for index, dims in wanted.items()})
    except OPENVINO_ERRORS as error:
        shapes = ", ".join(f"{names[index]}: ({','.join(map(str, dims))})" for index, dims in wanted.items())
        problem = Problem(
            f"the model does not accept the shapes {shapes}: {openvino_error_message(error)}", file=file, path="shape"
        )
        raise ConfigError([problem]) from error


def _spec_shapes(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, file: str) -> dict[int, tuple[Dim, ...]]:
    """Return the configured shapes by input position; ``auto`` keeps the model's own until a request."""
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    everywhere = "" in spec.shapes and spec.shapes[""].auto
    shapes = settings_by_port(
        "shape", spec.shapes, names, mapping.inputs, origin=spec.origin, anonymous_everywhere=everywhere
    )
    if shapes:
        if spec.batch is not None:
            log.warning("batch size ignored, because a shape is set", model=spec.name)
        return {index: shape.dims for index, shape in shapes.items() if shape.dims is not None}
    if spec.batch is None or spec.batch.dim is None:
        return {}
    return _batched_shapes(read_signature(model, mapping, file), spec.batch.dim, spec, file)


def _batched_shapes(signature: ModelSignature, batch: Dim, spec: ModelSpec, file: str) -> dict[int, tuple[Dim, ...]]:
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
# Recompilation
# ----------------------------------------------------------------------

NUM_REQUESTS_HINT: Final = "PERFORMANCE_HINT_NUM_REQUESTS"


@dataclass(frozen=True, slots=True)
class Recompiler:
    """Recompiles a model for a given concurrency; the result can be recompiled in the same way.

    Attributes:
        build: compiles the model with settings and runs it once, so that no request pays for the first run.
    """

    build: Callable[[Mapping[str, str]], Compiled]
    config: Mapping[str, str]  # settings for all cores
    on_loop: Mapping[str, str] | None = None  # settings of one thread, if the event loop has its own model
    can_choose_concurrency: bool = False  # whether the server may choose the concurrency
    is_for_loop: bool = False  # whether concurrency 0 means the one-thread model alone

    def __call__(self, at_once: int) -> Compiled:
        """Compile and run the model for a concurrency; raise ConfigError if the device cannot compile it. Blocks."""
        if self.on_loop is None:
            return self.of(self._for_all_cores(at_once))
        loop = self.build(self.on_loop)
        return self.of(self._for_all_cores(at_once).with_inline_model(loop) if at_once else loop)

    def of(self, compiled: Compiled) -> Compiled:
        """Return ``compiled`` with this object as its recompiler."""
        return replace(
            compiled, recompile=self, can_choose_concurrency=self.can_choose_concurrency, is_for_loop=self.is_for_loop
        )

    def _for_all_cores(self, at_once: int) -> Compiled:
        side_by_side = {"PERFORMANCE_HINT": "THROUGHPUT", NUM_REQUESTS_HINT: str(at_once)} if at_once > 1 else {}
        return self.build({**self.config, **side_by_side})


# ----------------------------------------------------------------------
# Compilation
# ----------------------------------------------------------------------

SMALL_MODEL_WEIGHT_BYTES: Final = 8 * 2**20
SMALL_MODEL_OPERATIONS: Final = 2_000
"""Models within both bounds are first compiled for one thread and timed."""

# Limit for a one-thread model to stay one on few cores; above it several threads answer sooner (benchmarks/RESULTS.md).
_MAX_INLINE_SECONDS_FEW_CORES: Final = 350e-6

_MIN_CACHED_OPERATIONS: Final = 100  # smaller models compile as fast as a cached blob loads (docs/compiled_files.md)
_MIN_CACHED_F16_BYTES: Final = 2**20

_USER_SETTINGS: Final = {"INFERENCE_NUM_THREADS", "NUM_STREAMS"}
LATENCY: Final = "LATENCY"
CPU_PINNING: Final = "ENABLE_CPU_PINNING"
_INLINE_CONFIG: Final = {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": LATENCY}
# OpenVINO pins the inferring thread, here the event loop, to one core during each inference. The loop would have to
# migrate, and to wait if another process uses that core.
_UNPINNED_CONFIG: Final = {CPU_PINNING: "NO"}
# Cache entries per stream, one per operation and shape. OpenVINO's default of 5,000 grows without bound under varying
# shapes and has no measurable benefit (docs/memory.md).
_CACHED_SHAPES: Final = {"CPU_RUNTIME_CACHE_CAPACITY": "256"}
# Requests per concurrent inference: one more waits in OpenVINO's queue, so that the device is never idle.
_REQUESTS_PER_INFERENCE: Final = 2
# The same for short inferences with small tensors, whose completions the loop processes in batches.
_REQUESTS_PER_SHORT_INFERENCE: Final = 8
_SHORT_SECONDS: Final = 3e-3
_SMALL_TENSORS_BYTES: Final = 64 * 2**10


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Source of a model: file, configuration and input shapes of a request by input name.

    ``labels`` name the classes of its outputs; ``kept`` is the server's compile cache, used if the user set none.
    """

    file: Path
    spec: ModelSpec
    mapping: TensorMapping = NO_MAPPING
    requested: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    kept: Path | None = None


def compile_model(source: ModelFile) -> Compiled:
    """Load and compile a model and time its first inferences. Blocks.

    A small model without user-defined threads, streams or throughput hint is first compiled for one thread. This
    model is kept if its inferences are short enough for the event loop.

    Raises:
        ConfigError: the file cannot be read, a setting does not fit, or the device cannot compile the model; the
            message has the file and OpenVINO's reason.
    """
    return compile_loaded(read_model(source.file), source)


def compile_loaded(model: ov.Model, source: ModelFile) -> Compiled:
    """Compile a model that was read already, modifying it; otherwise like :func:`compile_model`."""
    spec, file = source.spec, str(source.file)
    model = preprocess(model, spec, source.mapping)
    reshape(model, spec, source.mapping, source.requested, file)
    if spec.batching is not None:
        enable_dynamic_batch(model, spec.batching, source.mapping, file)
    buckets = plan_buckets(model, spec, source.mapping, file)
    return replace(_compile_shaped(model, source), buckets=buckets)


def _compile_shaped(model: ov.Model, source: ModelFile) -> Compiled:
    spec, file = source.spec, str(source.file)
    signature = read_signature(model, source.mapping, file)
    if spec.low_latency_transformation:
        _unroll_loops(model, file)
    variables = read_variables(model, file) if spec.stateful else ()
    config = _compile_config(source, model)
    build = partial(_build, model, source, signature, variables)
    if _is_small(model) and not _USER_SETTINGS & config.keys() and config.get("PERFORMANCE_HINT", LATENCY) == LATENCY:
        unbound = _UNPINNED_CONFIG if spec.target_device == "CPU" else {}
        on_loop = {**unbound, **config, **_INLINE_CONFIG}
        compiled = build(on_loop)
        if _can_run_inline(compiled):
            return _with_recompilation(compiled, model, source, Recompiler(build, config, on_loop, is_for_loop=True))
    return _with_inline_model(build(config), model, source, Recompiler(build, config, _one_stream(config, 1)))


def _can_run_inline(compiled: Compiled) -> bool:
    """Return whether the shortest run of a one-thread model is short enough for the event loop.

    The minimum is used, as other models loading at the same time make runs up to three times longer on few cores.
    """
    most = _MAX_INLINE_SECONDS_FEW_CORES if CORES.are_few else INLINE_THRESHOLD_SECONDS
    timing = compiled.timing
    return timing is not None and timing.min_seconds < most and compiled.placement.is_inline


def _with_recompilation(compiled: Compiled, model: ov.Model, source: ModelFile, again: Recompiler) -> Compiled:
    """Allow recompilation of a one-thread model for all cores if requests turn out to be slow."""
    if CORES.count == 1 or source.spec.target_device != "CPU" or _has_unmanaged_state(model, source):
        return compiled
    can_choose_concurrency = _can_choose_concurrency(model, source, source.spec.plugin_config, CORES.count)
    return replace(again, can_choose_concurrency=can_choose_concurrency).of(compiled)


def _with_inline_model(compiled: Compiled, model: ov.Model, source: ModelFile, again: Recompiler) -> Compiled:
    """Add a one-thread model for inline inference; a thread switch would cost more than a short inference."""
    is_left = compiled.streams > 1 and source.spec.target_device == "CPU" and not _has_unmanaged_state(model, source)
    if not is_left or compiled.timing is None or again.on_loop is None or not _is_small(model):
        return compiled
    try:
        loop = again.build(again.on_loop)
    except ConfigError as error:
        log.info("inline model copy not compiled", reason=str(error))
        return compiled
    if not _can_run_inline(loop):
        return compiled
    return replace(again, can_choose_concurrency=compiled.can_choose_concurrency).of(compiled.with_inline_model(loop))


def _unroll_loops(model: ov.Model, file: str) -> None:
    manager = Manager()
    manager.register_pass(LowLatency2())
    try:
        manager.run_passes(model)
    except OPENVINO_ERRORS as error:
        message = f"the low latency transformation fails: {openvino_error_message(error)}"
        raise ConfigError([Problem(message, file=file, path="low_latency_transformation")]) from error


def _is_small(model: ov.Model) -> bool:
    operations = model.get_ops()
    if len(operations) > SMALL_MODEL_OPERATIONS:
        return False
    return _weight_bytes(operations) <= SMALL_MODEL_WEIGHT_BYTES


def _weight_bytes(operations: Iterable[ov.Node]) -> int:
    return sum(int(node.get_byte_size()) for node in operations if node.get_type_name() == "Constant")


def _compile_config(source: ModelFile, model: ov.Model) -> dict[str, str]:
    spec = source.spec
    config = dict(spec.plugin_config)
    follows_requests = any(shape.auto for shape in spec.shapes.values()) or (spec.batch is not None and spec.batch.auto)
    if spec.cache_dir is not None and (spec.allow_cache or not follows_requests):
        config.setdefault("CACHE_DIR", str(spec.cache_dir))
    elif source.kept is not None and not follows_requests and _is_worth_keeping(model):
        config.setdefault("CACHE_DIR", str(source.kept))
    return config


def _is_worth_keeping(model: ov.Model) -> bool:
    """Return whether a compiled file saves time, or memory: OpenVINO expands f16 weights to f32, and maps a file."""
    operations = model.get_ops()
    halves = (node for node in operations if node.get_output_element_type(0) == ov.Type.f16)
    return len(operations) >= _MIN_CACHED_OPERATIONS or _weight_bytes(halves) >= _MIN_CACHED_F16_BYTES


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
    """Return the settings of a model that shares the cores; pinned models would all get the same ones.

    Unpinned threads run on any free core. OpenVINO limits a process to as many threads as cores (plus one per stream),
    so all models may request that many.
    """
    threads = {} if CORES.processes == 1 else {"INFERENCE_NUM_THREADS": str(CORES.count)}
    return threads | ({CPU_PINNING: "NO"} if CORES.is_shared else {})


def _is_pinned(
    compiled: ov.CompiledModel, model: ov.Model, source: ModelFile, config: Mapping[str, str], *, was_shared: bool
) -> bool | None:
    """Return whether threads are pinned; None if the user chose, OpenVINO does not pin, or requests hold state."""
    if CPU_PINNING in config or source.spec.target_device != "CPU" or _has_unmanaged_state(model, source):
        return None
    is_bound = bool(_property(compiled, CPU_PINNING, 0))
    return is_bound if is_bound or was_shared or CORES.is_shared else None


def _cannot_compile(source: ModelFile, error: BaseException) -> Problem:
    spec, text = source.spec, openvino_error_message(error)
    path = suggestion = ""
    if spec.target_device.split(":")[0] not in {*available_devices(), "AUTO", "MULTI", "HETERO", "BATCH"}:
        path, suggestion = "target_device", f"devices here: {', '.join(available_devices())}"
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
    compile_replacement = partial(_compile, model, source, config)
    was_shared = CORES.is_shared
    compiled = compile_replacement()
    streams = _property(compiled, "NUM_STREAMS", 1)
    threads = _property(compiled, "INFERENCE_NUM_THREADS", 1)
    may_fail = bool(model.is_dynamic())
    if may_fail and streams > 1:
        compile_replacement = partial(_compile, model, source, _one_stream(config, threads))
    alone_config = _one_stream(config, max(1, threads // max(1, streams)))
    blocking = _blocking_mode(source, signature, loses_failures=may_fail and threads <= 1)
    # The thread's CPU time excludes other models that load at the same time; valid if this thread does all the work.
    is_single_threaded = threads <= 1 and blocking is not InferMode.QUEUED
    timing = warm_up(compiled, signature, blocking, time.thread_time if is_single_threaded else time.perf_counter)
    if timing is None:
        # A stream that has failed is tainted, so compile a new model.
        compiled = _compile(model, source, config)
    grows = any(not dim.is_fixed for variable in variables for dim in variable.shape) or signature.depends_on_values
    limit = FILLING_THRESHOLD_SECONDS if _fills_few_cores(compiled, streams, threads) else None
    placement = Placement.away()
    if timing is not None and (limit is not None or _is_small(model)) and not grows:
        is_alone = is_single_threaded and streams == 1 and CORES.are_few
        placement = _measured_placement(timing, signature, limit, is_alone=is_alone)
    can_choose_concurrency = timing is not None and _can_choose_concurrency(model, source, config, threads)
    concurrency = source.spec.nireq or _property(compiled, "OPTIMAL_NUMBER_OF_INFER_REQUESTS", 1)
    return Compiled(
        model=compiled,
        compile_replacement=compile_replacement,
        compile_profiled=partial(_compile, model, source, {**config, **PROFILING_CONFIG}),
        recompile=Recompiler(
            partial(_build, model, source, signature, variables), config, can_choose_concurrency=can_choose_concurrency
        ),
        isolated=lambda: tuple(_compile(model, source, alone_config) for _ in range(streams)),
        signature=signature,
        placement=placement,
        timing=timing,
        nireq=source.spec.nireq or concurrency * _requests_per_inference(signature, timing, placement),
        concurrency=concurrency,
        streams=streams,
        may_fail=may_fail,
        blocking=blocking,
        variables=variables,
        weight_bytes=_weight_bytes(model.get_ops()),
        is_pinned=_is_pinned(compiled, model, source, config, was_shared=was_shared),
        can_choose_concurrency=can_choose_concurrency,
    )


def _blocking_mode(source: ModelFile, signature: ModelSignature, *, loses_failures: bool) -> InferMode:
    """Return the mode of inferences on the calling thread, where OpenVINO's synchronous call may lose failures."""
    if any(spec.datatype is BYTES for spec in signature.outputs):
        return InferMode.QUEUED  # The synchronous call reads the outputs, and fails on an empty string tensor.
    if not loses_failures:
        return InferMode.SYNCHRONOUS
    marks_failures = source.spec.target_device == "CPU" and failure_marks(signature) is not None
    return InferMode.MARKED if marks_failures else InferMode.QUEUED


def _measured_placement(timing: Timing, signature: ModelSignature, limit: float | None, *, is_alone: bool) -> Placement:
    most = FEW_CORES_THRESHOLD_SECONDS if is_alone else INLINE_THRESHOLD_SECONDS
    return Placement.measured(
        timing.min_seconds, timing.input_bytes, fixed_shape=signature.has_fixed_inputs, most=most, limit=limit
    )


def _requests_per_inference(signature: ModelSignature, timing: Timing | None, placement: Placement) -> int:
    if timing is None or timing.min_seconds > _SHORT_SECONDS:
        return _REQUESTS_PER_INFERENCE
    is_inline = placement.limit is None and placement.is_inline
    is_small = timing.input_bytes + signature.output_bytes <= _SMALL_TENSORS_BYTES
    return _REQUESTS_PER_SHORT_INFERENCE if is_small and not is_inline else _REQUESTS_PER_INFERENCE


def _fills_few_cores(compiled: ov.CompiledModel, streams: int, threads: int) -> bool:
    """Return whether one inference takes all cores of a small machine, without pinning the event loop's thread.

    One thread takes no more than the event loop does anyway, also if that is the only core of this process.
    """
    takes_all = streams == 1 and threads >= max(2, CORES.count)
    return CORES.are_few and takes_all and not _property(compiled, CPU_PINNING, 1)


def _can_choose_concurrency(model: ov.Model, source: ModelFile, config: Mapping[str, str], threads: int) -> bool:
    is_left = not (_USER_SETTINGS | {"PERFORMANCE_HINT", NUM_REQUESTS_HINT}) & config.keys()
    return is_left and threads > 1 and source.spec.target_device == "CPU" and not _has_unmanaged_state(model, source)


def _has_unmanaged_state(model: ov.Model, source: ModelFile) -> bool:
    """Return whether requests hold state that the server does not manage, so they cannot move to another model."""
    return bool(model.get_variables()) and not source.spec.stateful


def _one_stream(config: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the settings for one unpinned stream; pinned models would share cores."""
    ours = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads), CPU_PINNING: "NO"}
    return {name: value for name, value in config.items() if not name.startswith("PERFORMANCE_HINT")} | ours


def _property(model: ov.CompiledModel, name: str, default: int) -> int:
    try:
        return int(model.get_property(name))
    except OPENVINO_ERRORS:  # devices such as AUTO do not have every property
        return default
