"""Conversion of a Triton model repository to entries of ``config.json``, with a report of what has no counterpart.

::

    TritonRepository ── convert ──> Conversion of each model ─> entries of model_config_list, pipeline_config_list
                                              └───────────────> notes and reasons with file and line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ovmstrio.cli.triton_config import ENSEMBLE, TritonModel, TritonRepository
from ovmstrio.config.documents import Located, did_you_mean
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.serving.model_versions import find_model_file
from ovmstrio.util.regular_files import read_regular_bytes

# Fields of config.pbtxt

_HANDLED: Final = frozenset({
    "name", "platform", "backend", "default_model_filename", "max_batch_size", "version_policy", "parameters",
    "input.name", "input.data_type", "input.dims", "output.name", "output.data_type", "output.dims",
    "dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.default_queue_policy.max_queue_size",
    "sequence_batching.max_sequence_idle_microseconds", "sequence_batching.oldest.max_candidate_sequences",
    "ensemble_scheduling.step.model_name", "ensemble_scheduling.step.model_version",
    "ensemble_scheduling.step.input_map", "ensemble_scheduling.step.output_map",
})  # fmt: skip
"""Fields that are converted."""

_RESHAPE: Final = ("requests and responses have the model's own shape", "use the shape of reshape instead of dims")
_TENSORRT: Final = ("only TensorRT models have such tensors", "")
_METRICS: Final = ("metrics have fixed labels and buckets", "see docs/metrics.md")
_NOTES: Final[Mapping[str, tuple[str, str]]] = {
    "input.reshape": _RESHAPE,
    "output.reshape": _RESHAPE,
    "input.format": ("tensors are passed to the model as they are sent", "set layout to convert, such as NHWC:NCHW"),
    "input.optional": ("every input of a model is required", "send it with each request"),
    "input.allow_ragged_batch": ("only requests of equal shapes share a batch", "set shape_buckets to pad others"),
    "input.is_shape_tensor": _TENSORRT,
    "output.is_shape_tensor": _TENSORRT,
    "input.is_non_linear_format_io": _TENSORRT,
    "output.is_non_linear_format_io": _TENSORRT,
    "output.label_filename": ("class labels are read from labels.txt", "rename the file to labels.txt"),
    "batch_input": ("the server creates no tensors from the batch", "send the tensor with each request"),
    "batch_output": ("the server does not split outputs by the shape of an input", ""),
    "optimization": ("OpenVINO optimizes the model", "set plugin_config for properties of the device"),
    "dynamic_batching.preserve_ordering": ("responses are sent as soon as they are ready", ""),
    "dynamic_batching.priority_levels": ("the request parameter priority may be any number", ""),
    "dynamic_batching.default_priority_level": ("requests without priority run last", "send the parameter priority"),
    "dynamic_batching.default_queue_policy": (
        "requests wait until their deadline or their parameter timeout",
        "set max_concurrency and max_queue_time",
    ),
    "dynamic_batching.priority_queue_policy": ("priorities have no separate queues", ""),
    "sequence_batching.control_input": ("the model gets no control tensors", "clients send the sequence parameters"),
    "sequence_batching": ("requests of different sequences are not joined to a batch", ""),
    "instance_group": (
        "the server chooses how many inferences run at once",
        "set nireq, or NUM_STREAMS in plugin_config, to force a number",
    ),
    "cc_model_filenames": ("files are not chosen by GPU", "the file default_model_filename is served"),
    "model_warmup": ("no warm-up requests are sent", "the model is compiled before it is ready"),
    "model_operations": ("custom operations are not supported", "convert the model without them"),
    "model_transaction_policy": ("a model sends one response to each request", "use a graph for streams"),
    "model_repository_agents": ("repository agents are not supported", "check the files before they are copied"),
    "response_cache": ("responses are not cached", ""),
    "metric_tags": _METRICS,
    "model_metrics": _METRICS,
    "runtime": ("the runtime is always OpenVINO", ""),
    "ensemble_scheduling.max_inflight_requests": ("steps have no separate limit", "set max_concurrency"),
}
"""Message and suggestion for fields, or all fields below them, without a counterpart."""
_UNSET: Final = frozenset({"false", "False", "f", "0", '""', "FORMAT_NONE", "PRIORITY_DEFAULT"})

# Backends

_SUFFIXES: Final = {"onnxruntime": ".onnx", "openvino": ".xml", "tensorflow": ".pb"}
"""Converted backends, and the suffix of their model files."""
_MODEL_SUFFIXES: Final = frozenset({".xml", ".onnx", ".pdmodel", ".pb", ".tflite", ".graphdef"})
_SAVED_MODEL: Final = "saved_model.pb"
_AS_TEXT: Final = "list the model's folder in text_model_config_list, see docs/genai.md"
_AS_CODE: Final = "write it as a Python node of a graph (docs/graphs.md) or as a handler (docs/handlers.md)"
_ADVICE: Final = {
    "pytorch": "convert TorchScript with ovms prepare FILE --input NAME=TYPE[SIZES], or export the model to ONNX",
    "tensorrt": "use the ONNX model from which the plan was built",
    "python": f"{_AS_CODE}; BLS calls become models of the graph",
    "dali": f"{_AS_CODE}; images are decoded and resized by the server if the input has a layout (docs/kserve.md)",
    "vllm": _AS_TEXT,
    "tensorrtllm": _AS_TEXT,
    "fil": f"convert the trees to ONNX, or {_AS_CODE}",
}

_DEVICE: Final = "TARGET_DEVICE"
_PROPERTIES: Final = {
    **{each: each for each in ("PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "NUM_STREAMS")},
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "intra_op_thread_count": "INFERENCE_NUM_THREADS",
    "TF_NUM_INTRA_THREADS": "INFERENCE_NUM_THREADS",
}
"""OpenVINO property of each parameter of a backend."""
_BFLOAT16: Final = frozenset({"HINT_BF16", "ENFORCE_BF16"})
_SHAPE_PARAMETERS: Final = frozenset({"RESHAPE_IO_LAYERS", "SKIP_OV_DYNAMIC_BATCHSIZE", "ENABLE_BATCH_PADDING"})
_YES: Final = frozenset({"yes", "true", "1"})


@dataclass
class Conversion:
    """The conversion of one model.

    Attributes:
        model: the model folder.
        entry: settings of its entry in ``config.json``.
        notes: fields without a counterpart.
        reason: why the model is not converted; None if it is.
        links: links that make the version folders readable: paths below the folder of links, and their targets.
    """

    model: TritonModel
    entry: dict[str, Any] = field(default_factory=dict)
    notes: list[Problem] = field(default_factory=list)
    reason: Problem | None = None
    links: dict[Path, Path] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Result in words."""
        if self.reason is not None:
            return "not converted"
        return "converted with notes" if self.notes else "converted"

    def problem(self, message: str, *steps: str | int, suggestion: str = "", severity: Any = "warning") -> Problem:
        """Return a problem at a value of ``config.pbtxt``, or at the folder if there is none."""
        at = self.model.root.find(*steps)
        file = self.model.config_file if at.line else self.model.folder
        return Problem(message, str(file), at.line or None, at.path, suggestion=suggestion, severity=severity)

    def note(self, message: str, *steps: str | int, suggestion: str = "") -> None:
        """Add a note."""
        self.notes.append(self.problem(message, *steps, suggestion=suggestion))

    def refuse(self, message: str, *steps: str | int, suggestion: str = "") -> None:
        """Mark the model as not converted."""
        self.reason = self.problem(message, *steps, suggestion=suggestion)


@dataclass
class Conversions:
    """The conversions of a repository by name, and the errors of its configurations."""

    models: dict[str, Conversion]
    errors: tuple[Problem, ...]

    @property
    def converted(self) -> list[Conversion]:
        """The models that are converted."""
        return [each for each in self.models.values() if each.reason is None]

    def config(self, base_path: Callable[[Conversion], str]) -> dict[str, Any]:
        """Return the content of ``config.json``; ``base_path`` returns the path to write for a conversion."""
        done = self.converted
        models = [
            {"config": {"name": each.model.name, "base_path": base_path(each), **each.entry}}
            for each in done
            if each.model.backend != ENSEMBLE
        ]
        pipelines = [each.entry for each in done if each.model.backend == ENSEMBLE]
        return {"model_config_list": models} | ({"pipeline_config_list": pipelines} if pipelines else {})


def convert(repository: TritonRepository) -> Conversions:
    """Convert all models of a repository; reads model files, and blocks."""
    converter = _Converter(repository)
    for name in repository.models:
        converter.convert(name)
    done = {name: converter.done[name] for name in repository.models}
    return Conversions(done, (*repository.problems, *converter.errors))


@dataclass
class _Converter:
    repository: TritonRepository
    done: dict[str, Conversion] = field(default_factory=dict)
    errors: list[Problem] = field(default_factory=list)
    _running: list[str] = field(default_factory=list)

    def convert(self, name: str) -> Conversion:
        if name not in self.done:
            conversion = Conversion(self.repository.models[name])
            self._running.append(name)
            if not name.isprintable():
                conversion.refuse("the name has characters that no request can have", suggestion="rename the folder")
            elif conversion.model.backend == ENSEMBLE:
                self._ensemble(conversion)
            else:
                self._model(conversion)
            self._running.pop()
            conversion.notes.sort(key=lambda note: note.line or 0)
            self.done[name] = conversion
        return self.done[name]

    def _error(self, conversion: Conversion, message: str, *steps: str | int, suggestion: str = "") -> None:
        self.errors.append(conversion.problem(message, *steps, suggestion=suggestion, severity="error"))

    # Models

    def _model(self, conversion: Conversion) -> None:
        model = conversion.model
        if not model.versions:
            conversion.refuse("there is no version folder", suggestion=f"create {model.name}/1 with the model")
        elif not model.backend:
            conversion.refuse("unknown backend", suggestion="set backend, or name the model file as Triton does")
        elif model.backend not in _SUFFIXES:
            default = "convert the model to ONNX or OpenVINO IR, or write its code as a Python node (docs/graphs.md)"
            step = "backend" if model.config.backend else "platform"
            conversion.refuse(
                f"backend {model.backend!r} has no counterpart", step, suggestion=_ADVICE.get(model.backend, default)
            )
        else:
            self._check_tensors(conversion)
            for part in (self._files, self._state, self._versions, self._shapes, self._batching, self._parameters):
                if conversion.reason is None:
                    part(conversion)
            _add_notes(conversion)

    def _check_tensors(self, conversion: Conversion) -> None:
        for kind in ("input", "output"):
            for number, tensor in enumerate(getattr(conversion.model.config, kind)):
                if any(dim < 1 and dim != -1 for dim in tensor.dims):
                    self._error(conversion, "invalid dims: expected sizes above 0, or -1", kind, number, "dims")
        config = conversion.model.config
        if any(not 0 < size <= max(config.max_batch_size, 1) for size in config.dynamic_batching.preferred_batch_size):
            message = f"invalid preferred_batch_size: expected 1 to max_batch_size, {config.max_batch_size}"
            self._error(conversion, message, "dynamic_batching", "preferred_batch_size")

    def _files(self, conversion: Conversion) -> None:
        """Find the model file of each version, and link those that the server would not find itself."""
        model = conversion.model
        paths = {version: folder / model.filename for version, folder in model.versions.items()}
        files = {version: file for version, path in paths.items() if (file := _model_file(path)) is not None}
        if not files:
            named = "default_model_filename"
            conversion.refuse(
                f"no version folder has {model.filename}", named, suggestion=f"add it, or correct {named}"
            )
            return
        for version in paths.keys() - files.keys():
            conversion.note(f"version {version} has no {model.filename} and is not served")
        if len(files) == len(paths) and all(_is_found(model.versions[each], file) for each, file in files.items()):
            return
        conversion.note(
            "the server does not find the model file by its name: links to it are written",
            "default_model_filename",
            suggestion="run the migration again for a new version",
        )
        for version, file in files.items():
            conversion.links |= dict(_links(Path(model.name) / str(version), file, paths[version], model.backend))

    def _state(self, conversion: Conversion) -> None:
        """Convert sequence batching: only OpenVINO models with internal state have sequences."""
        model, entry = conversion.model, conversion.entry
        if not model.config.HasField("sequence_batching"):
            return
        sequences = model.config.sequence_batching
        files = [_model_file(folder / model.filename) for folder in model.versions.values()]
        if any(file is not None and (file.suffix != ".xml" or not _has_state(file)) for file in files):
            conversion.refuse(
                "the model has no internal state, and the server sends it no control tensors",
                "sequence_batching",
                suggestion="turn its state into that of an OpenVINO model with ovms prepare FILE --stateful",
            )
            return
        entry["stateful"] = True
        if sequences.oldest.max_candidate_sequences:
            entry["max_sequence_number"] = sequences.oldest.max_candidate_sequences
        if sequences.max_sequence_idle_microseconds:
            conversion.note(
                "idle sequences are removed after two intervals of the server's cleaner",
                "sequence_batching",
                "max_sequence_idle_microseconds",
                suggestion="set --sequence-cleaner-poll-wait-minutes",
            )

    def _versions(self, conversion: Conversion) -> None:
        policy, entry = conversion.model.config.version_policy, conversion.entry
        kind = policy.WhichOneof("policy_choice")
        if kind == "specific" and not any(version > 0 for version in policy.specific.versions):
            conversion.refuse("the version policy selects no version", "version_policy")
        elif kind == "specific":
            entry["model_version_policy"] = {
                "specific": {"versions": [each for each in policy.specific.versions if each > 0]}
            }
        elif kind == "all":
            entry["model_version_policy"] = {"all": {}}
        elif policy.latest.num_versions > 1:
            entry["model_version_policy"] = {"latest": {"num_versions": policy.latest.num_versions}}

    def _shapes(self, conversion: Conversion) -> None:
        """Write the shapes of inputs: Triton's ``dims`` have no batch dimension if ``max_batch_size`` is above 0."""
        config, entry = conversion.model.config, conversion.entry
        if "stateful" in entry:
            if config.max_batch_size > 1:
                conversion.note("a step of a sequence has the model's own batch size", "max_batch_size")
            return
        rows = [_range(config.max_batch_size)] if config.max_batch_size else []
        dims = {each.name: each.reshape.shape if each.HasField("reshape") else each.dims for each in config.input}
        if any(dim > 0 for each in dims.values() for dim in each) and all(
            each.name and each.dims for each in config.input
        ):
            entry["shape"] = {name: f"({','.join([*rows, *map(str, each)])})" for name, each in dims.items()}
        elif rows:
            entry["batch_size"] = rows[0]

    def _batching(self, conversion: Conversion) -> None:
        config, entry = conversion.model.config, conversion.entry
        if not config.HasField("dynamic_batching"):
            return
        if config.max_batch_size <= 1:
            conversion.note("requests are not joined, as max_batch_size is not above 1", "dynamic_batching")
            return
        batching = config.dynamic_batching
        sizes = sorted(set(batching.preferred_batch_size))
        delay = batching.max_queue_delay_microseconds / 1000
        largest = sizes[-1] if sizes else config.max_batch_size
        entry["batching"] = {"max_batch_size": largest, "batch_timeout_ms": delay, "eager": not delay}
        if batching.default_queue_policy.max_queue_size:
            entry["batching"]["max_queue_size"] = batching.default_queue_policy.max_queue_size
        if len(sizes) > 1:
            message = f"a batch runs with {largest} rows or after its delay; other preferred sizes have no effect"
            conversion.note(message, "dynamic_batching", "preferred_batch_size")

    def _parameters(self, conversion: Conversion) -> None:
        model, entry = conversion.model, conversion.entry
        properties: dict[str, str] = {}
        for number, located in enumerate(model.root.items("parameters")):
            at = ("parameters", number)
            key = located.find("key").value
            key = key[1:-1] if isinstance(key, str) else ""
            value = model.config.parameters[key].string_value if key in model.config.parameters else ""
            if key == _DEVICE:
                entry["target_device"] = value
            elif key in _PROPERTIES:
                # 0 threads are the default of the runtime.
                properties |= {} if value == "0" else {_PROPERTIES[key]: value}
            elif key in _BFLOAT16:
                properties |= {"INFERENCE_PRECISION_HINT": "bf16"} if value.lower() in _YES else {}
            elif key not in _SHAPE_PARAMETERS:
                conversion.note(f"the parameter {key!r} has no counterpart", *at)
        if properties:
            entry["plugin_config"] = properties

    # Ensembles

    def _ensemble(self, conversion: Conversion) -> None:
        count = len(self.errors)
        producers = self._producers(conversion)
        for check in (self._check_form, self._check_order, self._check_calls):
            if len(self.errors) == count:
                check(conversion, producers)
        if len(self.errors) > count:
            conversion.refuse("the ensemble is invalid", "ensemble_scheduling")
        elif conversion.reason is None:
            conversion.entry = _pipeline(conversion.model, producers)
            _add_notes(conversion)

    def _producers(self, conversion: Conversion) -> dict[str, tuple[str, tuple[str | int, ...]]]:
        """Return the node that provides each tensor of an ensemble, and where it is written."""
        config = conversion.model.config
        producers: dict[str, tuple[str, tuple[str | int, ...]]] = {
            each.name: (_REQUEST, ("input", number)) for number, each in enumerate(config.input)
        }
        for number, name in enumerate(_node_names(config.ensemble_scheduling.step)):
            at = ("ensemble_scheduling", "step", number, "output_map")
            for tensor in config.ensemble_scheduling.step[number].output_map.values():
                if tensor in producers:
                    self._error(conversion, f"the tensor {tensor!r} is provided twice", *at, suggestion="rename one")
                producers[tensor] = (name, at)
        return producers

    def _check_form(self, conversion: Conversion, producers: Mapping[str, tuple[str, Any]]) -> None:
        """Report missing fields, and tensors without a source or without a use."""
        config = conversion.model.config
        steps = config.ensemble_scheduling.step
        if not steps:
            self._error(conversion, "the ensemble has no step", "ensemble_scheduling", suggestion="add a step")
            return
        for number, step in enumerate(steps):
            at = ("ensemble_scheduling", "step", number)
            for key in ("model_name", "input_map", "output_map"):
                if not getattr(step, key):
                    self._error(conversion, f"the step has no {key}", *at, suggestion="add it")
            for tensor in sorted(set(step.input_map.values()) - producers.keys()):
                message = f"no step and no input of the ensemble provides {tensor!r}"
                self._error(conversion, message, *at, "input_map")
        outputs = [each.name for each in config.output]
        used = {*outputs, *(tensor for step in steps for tensor in step.input_map.values())}
        for tensor in sorted(producers.keys() - used):
            self._error(conversion, f"the tensor {tensor!r} is not used", *producers[tensor][1], suggestion="remove it")
        for number, name in enumerate(outputs):
            if producers.get(name, (_REQUEST,))[0] == _REQUEST:
                self._error(conversion, f"no step provides the output {name!r}", "output", number)

    def _check_order(self, conversion: Conversion, producers: Mapping[str, tuple[str, Any]]) -> None:
        """Report steps that need each other."""
        steps = conversion.model.config.ensemble_scheduling.step
        names = _node_names(steps)
        needs = {
            name: {producers[each][0] for each in step.input_map.values()}
            for name, step in zip(names, steps, strict=True)
        }
        ready = {_REQUEST}
        while more := {name for name, needed in needs.items() if needed <= ready} - ready:
            ready |= more
        waiting = [number for number, name in enumerate(names) if name not in ready]
        if waiting:
            named = ", ".join(names[each] for each in waiting)
            self._error(conversion, f"the steps need each other: {named}", "ensemble_scheduling", "step", waiting[0])

    def _check_calls(self, conversion: Conversion, producers: Mapping[str, tuple[str, Any]]) -> None:
        """Check that the called models are converted, and that a pipeline can call them."""
        for number, step in enumerate(conversion.model.config.ensemble_scheduling.step):
            at: tuple[str | int, ...] = ("ensemble_scheduling", "step", number, "model_name")
            name = step.model_name
            if name in self._running:
                circle = " > ".join([*self._running[self._running.index(name) :], name])
                self._error(conversion, f"ensembles call each other in a circle: {circle}", *at)
            elif name not in self.repository.models:
                conversion.refuse(f"there is no valid model {name!r} in the repository", *at)
            elif (called := self.convert(name)).reason is not None:
                conversion.refuse(f"the model {name!r} is not converted", *at)
            elif called.entry.get("stateful"):
                conversion.refuse(f"the model {name!r} has sequences, which a pipeline cannot call", *at)
            else:
                self._check_tensors_of_step(conversion, number, called, producers)

    def _check_tensors_of_step(
        self, conversion: Conversion, number: int, called: Conversion, producers: Mapping[str, tuple[str, Any]]
    ) -> None:
        """Check the tensors of a step against the ``config.pbtxt`` of its model, if that lists them."""
        at: tuple[str | int, ...] = ("ensemble_scheduling", "step", number)
        step = conversion.model.config.ensemble_scheduling.step[number]
        config, name = called.model.config, called.model.name
        for kind, mapped in (("input", step.input_map), ("output", step.output_map)):
            known = [each.name for each in getattr(config, kind)]
            for key in sorted(mapped.keys() - known) if known else ():
                suggestion = did_you_mean(key, known, otherwise=f"known are {', '.join(known)}")
                self._error(conversion, f"{name!r} has no {kind} {key!r}", *at, f"{kind}_map", suggestion=suggestion)
        for each in config.input:
            if each.name not in step.input_map and each.optional:
                message = f"the optional input {each.name!r} of {name!r} has no source, and every input is required"
                conversion.refuse(message, *at, "input_map")
            elif each.name not in step.input_map:
                self._error(conversion, f"the input {each.name!r} of {name!r} has no source", *at, "input_map")
            elif producers[step.input_map[each.name]][0] == _REQUEST:
                continue
            elif each.data_type == _STRING:
                message = f"the input {each.name!r} of {name!r} has strings of another step"
                conversion.refuse(message, *at, suggestion="models take strings only from the request")
            elif each.HasField("reshape"):
                message = f"the input {each.name!r} of {name!r} reshapes a tensor of another step"
                conversion.refuse(message, *at, suggestion="convert the model with the shape of dims")


_STRING: Final = 13  # TYPE_STRING
_REQUEST: Final = "request"
_RESERVED: Final = (_REQUEST, "response")


def _node_names(steps: Iterable[Any]) -> list[str]:
    """Return a unique node name for each step, that of its model if possible."""
    names: list[str] = []
    for step in steps:
        name, number = step.model_name, 2
        while name in names or name in _RESERVED:
            name, number = f"{step.model_name}_{number}", number + 1
        names.append(name)
    return names


def _pipeline(model: TritonModel, producers: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the pipeline of an ensemble; aliases are the ensemble's names of tensors."""

    def source(tensor: str) -> dict[str, str]:
        return {"node_name": producers[tensor][0], "data_item": tensor}

    steps = model.config.ensemble_scheduling.step
    nodes = [
        {
            "name": name,
            "type": "DL model",
            "model_name": step.model_name,
            **({"version": step.model_version} if step.model_version > 0 else {}),
            "inputs": [{key: source(step.input_map[key])} for key in sorted(step.input_map)],
            "outputs": [{"data_item": key, "alias": step.output_map[key]} for key in sorted(step.output_map)],
        }
        for name, step in zip(_node_names(steps), steps, strict=True)
    ]
    return {
        "name": model.name,
        "inputs": [each.name for each in model.config.input],
        "nodes": nodes,
        "outputs": [{each.name: source(each.name)} for each in model.config.output],
    }


# Files


def _model_file(path: Path) -> Path | None:
    """Return the file of a model, or of a folder in its place; None if there is none."""
    for name in (_SAVED_MODEL, "model.onnx"):
        if (path / name).is_file():
            return path / name
    return path if path.is_file() else None


def _is_found(version: Path, file: Path) -> bool:
    """Return whether the server finds the same file in the version folder."""
    try:
        found = find_model_file(version)
    except ConfigError:
        return False
    return found in (file, file.parent) if file.name == _SAVED_MODEL else found == file


def _links(version: Path, file: Path, path: Path, backend: str) -> Iterator[tuple[Path, Path]]:
    """Yield links for one version: to the folder of the file, or to the file and all files but other models."""
    if path.is_dir():
        yield version, path
        return
    name = file.name if file.suffix in _MODEL_SUFFIXES - {".graphdef"} else f"{file.stem}{_SUFFIXES[backend]}"
    yield version / name, file
    for other in sorted(file.parent.iterdir()):
        if other != file and other.suffix not in _MODEL_SUFFIXES:
            yield version / other.name, other


def _has_state(file: Path) -> bool:
    return b'type="ReadValue"' in read_regular_bytes(file)


def _range(largest: int) -> str:
    return "1" if largest == 1 else f"1:{largest}"


# Notes


def _add_notes(conversion: Conversion) -> None:
    """Add a note for every set field that has no counterpart."""
    for at, located in _fields(conversion.model.root, ""):
        if at not in _HANDLED and not _is_default(at, located):
            message, suggestion = _note_of(at, located)
            file = str(conversion.model.config_file)
            conversion.notes.append(
                Problem(message, file, located.line, located.path, suggestion=suggestion, severity="warning")
            )


def _fields(node: Located, path: str) -> Iterator[tuple[str, Located]]:
    """Yield fields with their paths without indices, down to those with one note and to single values."""
    for key, member in node.members.items():
        at = f"{path}.{key}" if path else key
        has_handled = any(each.startswith(f"{at}.") for each in _HANDLED)
        for item in member.value if isinstance(member.value, list) else [member]:
            if item.members and at not in _HANDLED and (has_handled or _noted_field(at) is None):
                yield from _fields(item, at)
            else:
                yield at, item


def _is_set(located: Located) -> bool:
    """Return whether a value differs from the default of its type."""
    inner = list(located.members.values()) or (located.value if isinstance(located.value, list) else [])
    return any(map(_is_set, inner)) if inner else located.value not in ({}, [], *_UNSET)


def _is_default(at: str, located: Located) -> bool:
    """Return whether the server does without a setting what the field asks for."""
    if at == "instance_group":
        is_single = located.find("count").value in ("1", located.value)
        return is_single and located.members.keys() <= {"name", "count", "kind"} and not _on_gpu(located)
    if at == "output.label_filename":
        return bool(located.value == '"labels.txt"')
    return not at.endswith(".reshape") and not _is_set(located)


def _on_gpu(group: Located) -> bool:
    return group.find("kind").value == "KIND_GPU" or "gpus" in group.members


def _noted_field(at: str) -> str | None:
    """Return the field of ``_NOTES`` that covers a field: itself, or the nearest one above."""
    while at and at not in _NOTES:
        at = at.rpartition(".")[0]
    return at or None


def _note_of(at: str, located: Located) -> tuple[str, str]:
    if at == "instance_group" and _on_gpu(located):
        return "instances on NVIDIA GPUs run on the CPU", "set target_device, such as GPU for one of Intel"
    noted = _noted_field(at)
    return _NOTES[noted] if noted else ("the field has no counterpart", "")
