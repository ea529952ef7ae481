"""OVMS's inference calculators: session, inference and tensor converter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import structlog

from ovmstrio.core.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidRequest,
    ModelFailure,
    NotFound,
    NotReady,
    Problem,
)
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import BY_NAME, RawTensor, Tensor
from ovmstrio.encoding.raw_contents import buffer_of, wrapped
from ovmstrio.graphs.calculator import (
    CalculatorKind,
    ContractError,
    DefinitionScope,
    NodeContext,
    NodeContract,
    NodeFailure,
)
from ovmstrio.graphs.calculators.nodes import (
    CalculatorBase,
    StatelessKind,
    find_options,
    map_entry,
    ports_of,
    required_input,
)
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef
from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.packets import MediaPipeTensor, OvTensor, TensorValue, TfTensor
from ovmstrio.graphs.python_nodes.api import Tensor as PythonTensor
from ovmstrio.graphs.tensors import MEDIAPIPE_DATATYPES, NUMERIC_DATATYPES, create_python_tensor, tensor_bytes
from ovmstrio.serving.kind import Dependency

if TYPE_CHECKING:
    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.service import ServableLookup

# Tensor names and types of streams

# The first matching prefix wins, so longer prefixes come first.
_PREFIXES: Final[tuple[tuple[str, type[TensorValue], bool], ...]] = (
    ("OVTENSORS", OvTensor, True),
    ("OVTENSOR", OvTensor, False),
    ("TENSORS", MediaPipeTensor, True),
    ("TENSOR", MediaPipeTensor, False),
    ("TFTENSOR", TfTensor, False),
)
_UNSUPPORTED: Final = "TFLITE_TENSOR"


class _InferenceOptions(Protocol):
    tag_to_input_tensor_names: Mapping[str, str]
    tag_to_output_tensor_names: Mapping[str, str]
    input_order_list: Sequence[str]
    output_order_list: Sequence[str]


@dataclass(frozen=True, slots=True)
class _PortPlan:
    """One stream: tensor class, tensor names, and whether it carries a tuple of tensors."""

    port: Port
    kind: type[TensorValue]
    names: tuple[str, ...]
    is_vector: bool = False

    @property
    def packet_type(self) -> type:
        return tuple if self.is_vector else self.kind

    def named_tensors(self, value: Any) -> list[tuple[str, TensorValue]]:
        if not self.is_vector:
            return [(self.names[0], value)]
        if len(value) != len(self.names):
            raise NodeFailure(
                f"input {self.port} carries {len(value)} tensors, expected {len(self.names)} (input_order_list)"
            )
        return list(zip(self.names, value, strict=True))

    def packet_of(self, given: Mapping[str, Tensor | RawTensor], servable: str) -> Any:
        values = []
        for name in self.names:
            tensor = given.get(name)
            if tensor is None:
                known = ", ".join(sorted(given)) or "none"
                raise NodeFailure(f'servable "{servable}" has no output "{name}" for {self.port}; known: {known}')
            values.append(self._convert(tensor))
        return tuple(values) if self.is_vector else values[0]

    def _convert(self, tensor: Tensor | RawTensor) -> TensorValue:
        typed = _array_tensor(tensor) if isinstance(tensor, RawTensor) else tensor
        datatype = typed.datatype
        if self.kind is MediaPipeTensor and datatype.name not in MEDIAPIPE_DATATYPES:
            wanted = ", ".join(sorted(MEDIAPIPE_DATATYPES))
            raise NodeFailure(f'output "{tensor.name}" is {datatype.name}, but {self.port} carries {wanted}')
        return self.kind(datatype, typed.array)


def _array_tensor(tensor: RawTensor) -> Tensor:
    if tensor.datatype in NUMERIC_DATATYPES:
        datatype, shape, data = BY_NAME[tensor.datatype], tuple(tensor.shape), memoryview(tensor.data)
        if min(shape, default=0) >= 0 and prod(shape) * datatype.itemsize == data.nbytes:
            return Tensor(tensor.name, datatype, wrapped(data, shape, datatype.numpy))
    raise NodeFailure(
        f'output "{tensor.name}" of {len(tensor.data)} bytes is not a {tensor.datatype} {list(tensor.shape)} tensor'
    )


def _create_port_plans(
    refs: Sequence[StreamRef], names: Mapping[str, str], order: Sequence[str], side: str
) -> tuple[_PortPlan, ...]:
    """Return the plan of each stream; ``side`` is ``input`` or ``output``."""
    plans = []
    for ref in refs:
        kind, is_vector = _kind_of(ref.port)
        named = tuple(order) if is_vector else (_name_of(ref, names),)
        plans.append(_PortPlan(ref.port, kind, named, is_vector))
    _check_order(plans, names, order, side)
    return tuple(plans)


def _kind_of(port: Port) -> tuple[type[TensorValue], bool]:
    if port.tag.startswith(_UNSUPPORTED):
        raise ContractError(f"{port}: TensorFlow Lite tensors are not supported", fix="use OVTENSOR")
    for prefix, kind, is_vector in _PREFIXES:
        if port.tag.startswith(prefix):
            return kind, is_vector
    return OvTensor, False


def _name_of(ref: StreamRef, names: Mapping[str, str]) -> str:
    """Return the tensor's name from the options, else the tag, else the stream name."""
    entry = map_entry(names, ref.port)
    if entry:
        return entry
    return str(ref.port) if ref.port.tag else ref.name


def _check_order(plans: Sequence[_PortPlan], names: Mapping[str, str], order: Sequence[str], side: str) -> None:
    vectors = [plan for plan in plans if plan.is_vector]
    option = f"{side}_order_list"
    if vectors and not order:
        raise ContractError(f"{vectors[0].port} carries several tensors", fix=f"name them in {option}")
    if order and len(vectors) != 1:
        raise ContractError(f"{option} needs exactly one OVTENSORS or TENSORS stream, got {len(vectors)}")
    if order and names:
        raise ContractError(f"{option} and tag_to_{side}_tensor_names exclude each other", fix="remove one")


# OpenVINOModelServerSessionCalculator

log = structlog.get_logger(__name__)

_SESSION_PORT: Final = Port("SESSION", 0)
_SESSION_OPTIONS: Final = "mediapipe.OpenVINOModelServerSessionCalculatorOptions"
_PRECONDITION: Final = "Mediapipe graph precondition failed - FAILED_PRECONDITION: CalculatorGraph::Run() failed: \n"
_NOT_LOADED: Final = "OpenVINOModelServerSessionCalculator failed to load the model"


class Session:
    """Client of one servable. Each call resolves the name, so a reload takes effect at once.

    Args:
        lease: leases servables.
        servable: the servable's name.
        version: as in a request; empty for the default version.
        node: canonical name of the session's node, for errors.
    """

    __slots__ = ("_lease", "_node", "servable", "version")

    def __init__(self, lease: ServableLookup, servable: str, version: str, node: str) -> None:
        self._lease = lease
        self._node = node
        self.servable = servable
        self.version = version

    async def check(self) -> None:
        """Check that the servable is loaded; wait while it loads."""
        try:
            with await self._lease(self.servable, self.version):
                return
        except (NotFound, NotReady) as error:
            raise self._missing("Open", error) from error

    async def infer(self, request: InferRequest) -> InferResponse:
        """Call the servable under a lease that ends with the response."""
        try:
            lease = await self._lease(self.servable, self.version)
        except (NotFound, NotReady) as error:
            raise self._missing("Process", error) from error
        with lease as held:
            return await held.servable.infer(request)

    def _missing(self, phase: str, error: NotFound | NotReady) -> FailedPrecondition:
        log.warning(
            "session servable not available", servable=self.servable, version=self.version, reason=error.message
        )
        where = f'Calculator::{phase}() for node "{self._node}" failed: {_NOT_LOADED}'
        return FailedPrecondition(f'{_PRECONDITION}{where} "{self.servable}": {error.message}')


class _SessionResources:
    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    async def open(self, context: NodeContext) -> _OpenSession:
        await self._session.check()
        context.emit_side(_SESSION_PORT, self._session)
        return _OpenSession()

    async def aclose(self) -> None:
        pass


class _OpenSession(CalculatorBase):
    async def process(self, context: NodeContext) -> None:
        pass


class _SessionKind:
    name: str = "OpenVINOModelServerSessionCalculator"

    def contract(self, node: NodeConfig) -> NodeContract:
        if node.inputs or node.outputs or node.side_inputs:
            raise ContractError(f"{self.name} has no streams and no input side packets", fix="remove them")
        if [ref.port for ref in node.side_outputs] != [_SESSION_PORT]:
            raise ContractError(
                f"{self.name} has exactly one output side packet, SESSION",
                fix='write output_side_packet: "SESSION:session"',
            )
        _servable_of(node)
        return NodeContract(side_outputs={_SESSION_PORT: Session})

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> _SessionResources:
        servable, version = _servable_of(node)
        if servable == scope.graph:
            message = f"graph {scope.graph!r} would call itself: servable_name is the graph's name"
            raise ConfigError([Problem(message, line=node.line or None, path=node.canonical_name)])
        return _SessionResources(Session(scope.lease, servable, version, node.canonical_name))


def _servable_of(node: NodeConfig) -> tuple[str, str]:
    """Return name and version of the servable; a version that is not a number means the default, as in OVMS."""
    options = find_options(node, _SESSION_OPTIONS)
    if options is None or not options.servable_name:
        raise ContractError(
            "servable_name is missing in the options",
            fix=f'add node_options {{ [type.googleapis.com/{_SESSION_OPTIONS}]: {{ servable_name: "..." }} }}',
        )
    version = options.servable_version
    return options.servable_name, version if version.isascii() and version.isdecimal() else ""


def find_session_calls(content: str, file: str) -> list[Dependency]:
    """Return the servables that the sessions of a graph call; sessions with invalid options are skipped.

    Args:
        content: text of the graph file.
        file: name of the graph file, for messages.
    """
    config = parse_graph_text(content, file).config
    calls = []
    for node in config.nodes if config is not None else ():
        if node.calculator != _SessionKind.name:
            continue
        with suppress(ContractError):
            name, version = _servable_of(node)
            place = Problem(
                f"the session {node.canonical_name!r} calls {name!r}", file, node.options_line or node.line or None
            )
            calls.append(Dependency(name, version, place))
    return calls


SESSION: Final[CalculatorKind] = _SessionKind()


# OpenVINOInferenceCalculator

_INFERENCE_NAME: Final = "OpenVINOInferenceCalculator"
_INFERENCE_OPTIONS: Final = "mediapipe.OpenVINOInferenceCalculatorOptions"


class _Inference(CalculatorBase):
    __slots__ = ("_inputs", "_outputs", "_session")

    def __init__(self, inputs: tuple[_PortPlan, ...], outputs: tuple[_PortPlan, ...], context: NodeContext) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._session: Session = context.side[_SESSION_PORT]

    async def process(self, context: NodeContext) -> None:
        request = self._request(context)
        try:
            response = await self._session.infer(request)
        except (InvalidRequest, ModelFailure) as error:
            raise NodeFailure(f'servable "{self._session.servable}": {error.message}') from error
        given = {tensor.name: tensor for tensor in response.outputs}
        for plan in self._outputs:
            context.emit(plan.port, plan.packet_of(given, self._session.servable))

    def _request(self, context: NodeContext) -> InferRequest:
        instance, session = context.instance, self._session
        request = InferRequest(session.servable, session.version, instance.request_id, deadline=instance.deadline)
        for plan in self._inputs:
            for name, tensor in plan.named_tensors(required_input(context, plan.port)):
                request.inputs.append(InferInput(name, tensor.datatype.name, tensor.array.shape))
                request.raw_inputs.append(buffer_of(tensor.array))
        return request


def _inference_contract(node: NodeConfig) -> NodeContract:
    if [ref.port for ref in node.side_inputs] != [_SESSION_PORT]:
        raise ContractError(
            f"{_INFERENCE_NAME} needs exactly one input side packet, SESSION",
            fix='write input_side_packet: "SESSION:session" and add an OpenVINOModelServerSessionCalculator',
        )
    inputs, outputs = _plans(node)
    return NodeContract(
        {plan.port: plan.packet_type for plan in inputs},
        {plan.port: plan.packet_type for plan in outputs},
        {_SESSION_PORT: Session},
        propagates_bounds=True,
    )


def _plans(node: NodeConfig) -> tuple[tuple[_PortPlan, ...], tuple[_PortPlan, ...]]:
    options: _InferenceOptions | None = find_options(node, _INFERENCE_OPTIONS)
    if not node.inputs or not node.outputs:
        raise ContractError(f"{_INFERENCE_NAME} needs at least one input and one output stream")
    if options is None:
        return _create_port_plans(node.sorted_inputs, {}, (), "input"), _create_port_plans(
            node.sorted_outputs, {}, (), "output"
        )
    return (
        _create_port_plans(node.sorted_inputs, options.tag_to_input_tensor_names, options.input_order_list, "input"),
        _create_port_plans(
            node.sorted_outputs, options.tag_to_output_tensor_names, options.output_order_list, "output"
        ),
    )


INFERENCE: Final[CalculatorKind] = StatelessKind(
    _INFERENCE_NAME, _inference_contract, lambda node: partial(_Inference, *_plans(node))
)


# PyTensorOvTensorConverterCalculator

_CONVERTER_NAME: Final = "PyTensorOvTensorConverterCalculator"
_CONVERTER_OPTIONS: Final = "mediapipe.PyTensorOvTensorConverterCalculatorOptions"
_PYTHON: Final = "OVMS_PY_TENSOR"
_OPENVINO: Final = "OVTENSOR"
_TYPES: Final = {_PYTHON: PythonTensor, _OPENVINO: OvTensor}
_OTHER: Final = {_PYTHON: _OPENVINO, _OPENVINO: _PYTHON}


class _Target(NamedTuple):
    """Output of a converted tensor; ``name`` is the Python tensor's name, empty for an OpenVINO tensor."""

    port: Port
    name: str


def python_to_ov_tensor(tensor: PythonTensor) -> OvTensor:
    """Convert a Python tensor to an OpenVINO tensor of the same datatype and shape."""
    if tensor.datatype not in NUMERIC_DATATYPES:
        raise NodeFailure(f"Undefined precision in input python tensor: {tensor.datatype}", "INVALID_ARGUMENT")
    datatype, shape = BY_NAME[tensor.datatype], tuple(tensor.shape)
    for size in shape:
        if size < 0:
            raise NodeFailure(f"dimension negative during conversion: {size}", "INVALID_ARGUMENT")
    expected = prod(shape) * datatype.itemsize
    if tensor.size != expected:
        sizes = f"python buffer size: {tensor.size}; OV tensor size: {expected}"
        raise NodeFailure(f"{sizes}; mismatch", "INVALID_ARGUMENT")
    return OvTensor(datatype, wrapped(tensor_bytes(tensor), shape, datatype.numpy))


def ov_to_python_tensor(name: str, tensor: OvTensor) -> PythonTensor:
    """Convert an OpenVINO tensor to a Python tensor."""
    datatype = tensor.datatype.name
    if datatype not in NUMERIC_DATATYPES:
        raise NodeFailure(f"Undefined precision in input tensor: {tensor.datatype.openvino}", "INVALID_ARGUMENT")
    return create_python_tensor(name, buffer_of(tensor.array), tensor.array.shape, datatype)


class _Converter(CalculatorBase):
    __slots__ = ("_targets",)

    def __init__(self, targets: Mapping[Port, _Target], context: NodeContext) -> None:
        del context
        self._targets = targets

    async def process(self, context: NodeContext) -> None:
        if not context.inputs:
            raise NodeFailure(f"no input at timestamp {context.timestamp}")
        for port, value in context.inputs.items():
            target = self._targets[port]
            converted: Any = ov_to_python_tensor(target.name, value) if target.name else python_to_ov_tensor(value)
            context.emit(target.port, converted)


def _converter_contract(node: NodeConfig) -> NodeContract:
    targets = _targets(node)
    if node.side_inputs or node.side_outputs:
        raise ContractError(f"{_CONVERTER_NAME} has no side packets", fix="remove them")
    inputs: dict[Port, type] = {port: _TYPES[_prefix(port)] for port in targets}
    outputs: dict[Port, type] = {target.port: _TYPES[_prefix(target.port)] for target in targets.values()}
    return NodeContract(inputs, outputs, propagates_bounds=True)


def _prefix(port: Port) -> str:
    for prefix in _TYPES:
        if port.tag.startswith(prefix):
            return prefix
    raise ContractError(
        f"{port} is not a tag of {_CONVERTER_NAME}", fix=f"use tags that begin with {_PYTHON} or {_OPENVINO}"
    )


def _partner(port: Port) -> Port:
    prefix = _prefix(port)
    return Port(_OTHER[prefix] + port.tag.removeprefix(prefix), port.index)


def _targets(node: NodeConfig) -> dict[Port, _Target]:
    inputs, outputs = ports_of(node.inputs), set(ports_of(node.outputs))
    if not inputs or not outputs:
        raise ContractError(f"{_CONVERTER_NAME} needs at least one input and one output stream")
    partners = {port: _partner(port) for port in inputs}
    for port, partner in partners.items():
        if partner not in outputs:
            raise ContractError(f"input {port} has no output {partner}", fix=f'add output_stream: "{partner}:..."')
    unmatched = outputs - set(partners.values())
    if unmatched:
        port = min(unmatched)
        raise ContractError(f"output {port} has no input {_partner(port)}", fix="remove it or add the input")
    return {port: _Target(partner, _name_for(node, partner)) for port, partner in partners.items()}


def _name_for(node: NodeConfig, output: Port) -> str:
    """Return the name of the Python tensor on this output; empty for OpenVINO tensors."""
    if _prefix(output) == _OPENVINO:
        return ""
    options = find_options(node, _CONVERTER_OPTIONS)
    name = None if options is None else map_entry(options.tag_to_output_tensor_names, output)
    if not name:
        entry = f'tag_to_output_tensor_names {{ key: "{output}" value: "..." }}'
        raise ContractError(
            f"tag_to_output_tensor_names has no name for the Python tensor of output {output}",
            fix=f"add node_options {{ [type.googleapis.com/{_CONVERTER_OPTIONS}]: {{ {entry} }} }}",
        )
    return name


CONVERTER: Final[CalculatorKind] = StatelessKind(
    _CONVERTER_NAME, _converter_contract, lambda node: partial(_Converter, _targets(node))
)
