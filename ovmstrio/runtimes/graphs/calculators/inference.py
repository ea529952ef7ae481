"""OpenVINOInferenceCalculator: the inputs of a run become one call of the session's servable."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculator import NodeFailure as Failure
from ovmstrio.runtimes.graphs.calculators.inference_ports import InferenceOptions, PortPlan, plan_ports
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, options_of, required_input
from ovmstrio.runtimes.graphs.calculators.session import SESSION_PORT, Session
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.runtimes.models.buffers import buffer_of

if TYPE_CHECKING:
    from ovmstrio.runtimes.graphs.packets import TensorValue

__all__ = ["INFERENCE"]

_NAME: Final = "OpenVINOInferenceCalculator"
_OPTIONS: Final = "mediapipe.OpenVINOInferenceCalculatorOptions"


class _Inference(Stateless):
    """Calls the servable once for each set of inputs."""

    __slots__ = ("_inputs", "_outputs", "_session")

    def __init__(self, inputs: tuple[PortPlan, ...], outputs: tuple[PortPlan, ...], context: NodeContext) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._session: Session = context.side[SESSION_PORT]

    async def process(self, context: NodeContext) -> None:
        """Call the servable and send what it answers.

        Raises:
            NodeFailure: an input is missing, the servable refuses it or fails, or it gives no such output.
            FailedPrecondition: the servable is not there any more.
            ServerError: it is overloaded, or the deadline has passed.

        Cancellation: as the servable's own ``infer``.
        """
        request = self._request(context)
        try:
            response = await self._session.infer(request)
        except (InvalidRequest, ModelFailure) as error:
            raise Failure(f'servable "{self._session.servable}": {error.message}') from error
        given = {tensor.name: tensor for tensor in response.outputs}
        for plan in self._outputs:
            context.emit(plan.port, plan.collect(given, self._session.servable))

    def _request(self, context: NodeContext) -> InferRequest:
        """Make a request whose buffers are the arrays themselves."""
        instance, session = context.instance, self._session
        request = InferRequest(session.servable, session.version, instance.request_id, deadline=instance.deadline)
        for plan in self._inputs:
            for name, tensor in plan.spread(required_input(context, plan.port)):
                _add(request, name, tensor)
        return request


def _add(request: InferRequest, name: str, tensor: TensorValue) -> None:
    request.inputs.append(InferInput(name, tensor.datatype.name, tensor.array.shape))
    request.raw_inputs.append(buffer_of(tensor.array))


def _contract(node: NodeConfig) -> NodeContract:
    """Say which tags carry which tensors.

    Raises:
        ContractError: there is no session, a tag is not supported, or the options contradict the tags.
    """
    if [ref.port for ref in node.side_inputs] != [SESSION_PORT]:
        raise ContractError(
            f"{_NAME} needs exactly one input side packet, SESSION",
            fix='write input_side_packet: "SESSION:session" and add an OpenVINOModelServerSessionCalculator',
        )
    inputs, outputs = _plans(node)
    return NodeContract(
        {plan.port: plan.carried for plan in inputs},
        {plan.port: plan.carried for plan in outputs},
        {SESSION_PORT: Session},
        propagates_bounds=True,
    )


def _plans(node: NodeConfig) -> tuple[tuple[PortPlan, ...], tuple[PortPlan, ...]]:
    options: InferenceOptions | None = options_of(node, _OPTIONS)
    if not node.inputs or not node.outputs:
        raise ContractError(f"{_NAME} needs at least one input and one output stream")
    if options is None:
        return plan_ports(node.sorted_inputs, {}, (), "input"), plan_ports(node.sorted_outputs, {}, (), "output")
    return (
        plan_ports(node.sorted_inputs, options.tag_to_input_tensor_names, options.input_order_list, "input"),
        plan_ports(node.sorted_outputs, options.tag_to_output_tensor_names, options.output_order_list, "output"),
    )


INFERENCE: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda node: partial(_Inference, *_plans(node)))
