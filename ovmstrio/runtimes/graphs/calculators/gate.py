"""GateCalculator: lets packets through, or drops them, as a stream, a side packet or an option says."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, given_options, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port, StreamRef

__all__ = ["GATE"]

_NAME: Final = "GateCalculator"
_OPTIONS: Final = "mediapipe.GateCalculatorOptions"
_ALLOW: Final = Port("ALLOW", 0)
_DISALLOW: Final = Port("DISALLOW", 0)
_CONTROLS: Final = frozenset({_ALLOW, _DISALLOW})
_STATE_CHANGE: Final = Port("STATE_CHANGE", 0)
_UNINITIALIZED, _OPEN, _SHUT = 1, 2, 3


class _Gate(Stateless):
    """Knows whether it was open, to tell of changes.

    Args:
        fixed: whether it is open for the whole run; None where a stream says so.
        default: whether it is open when the stream says nothing at a timestamp.
        tells: whether there is an output for changes.
        state: what the first state is compared with, one of ``GateCalculatorOptions.GateState``.
        ends: the outputs that end with the first run that finds the gate shut, for it will never open.
    """

    __slots__ = ("_default", "_ends", "_fixed", "_state", "_tells")

    def __init__(
        self, *, fixed: bool | None, default: bool, tells: bool, state: int, ends: tuple[Port, ...] = ()
    ) -> None:
        self._fixed = fixed
        self._default = default
        self._tells = tells
        self._state = state
        self._ends = ends

    async def process(self, context: NodeContext) -> None:
        """Send on what has come, if the gate is open.  Never waits."""
        is_open = _stated(context.inputs) if self._fixed is None else self._fixed
        if is_open is None:
            is_open = self._default
        state = _OPEN if is_open else _SHUT
        if self._tells and self._state not in {_UNINITIALIZED, state}:
            context.emit(_STATE_CHANGE, is_open)
        self._state = state
        if is_open:
            for port, value in context.inputs.items():
                if port not in _CONTROLS:
                    context.emit(port, value)
        for port in self._ends:
            context.close_output(port)


def _stated(values: Any) -> bool | None:
    """Give what a control says, None where there is none."""
    if _ALLOW in values:
        return bool(values[_ALLOW])
    return not values[_DISALLOW] if _DISALLOW in values else None


def _open(context: NodeContext) -> _Gate:
    options = given_options(context.node, _OPTIONS)
    by_side_packet = _stated(context.side)
    fixed = by_side_packet
    if fixed is None and not _CONTROLS & set(ports_of(context.node.inputs)):
        fixed = options.allow
    outputs = ports_of(context.node.outputs)
    return _Gate(
        fixed=fixed,
        default=options.empty_packets_as_allow,
        tells=_STATE_CHANGE in outputs,
        state=options.initial_gate_state,
        ends=tuple(port for port in outputs if port != _STATE_CHANGE) if by_side_packet is False else (),
    )


def _contract(node: NodeConfig) -> NodeContract:
    """Accept any streams, an output for each, and at most one control.

    Raises:
        ContractError: there are several controls, or a stream has no partner.
    """
    _check_control(node)
    data = {port for port in ports_of(node.inputs) if port not in _CONTROLS}
    results = {port for port in ports_of(node.outputs) if port != _STATE_CHANGE}
    lonely = data ^ results
    if lonely:
        raise ContractError(
            f"{_NAME} needs an output for each data stream; without a partner: {', '.join(sorted(map(str, lonely)))}",
            fix="give each output the tag of its input",
        )
    return NodeContract(
        _types(node.inputs),
        _types(node.outputs),
        _types(node.side_inputs),
        optional_side=_CONTROLS,
        propagates_bounds=True,
    )


def _types(refs: tuple[StreamRef, ...]) -> dict[Port, type]:
    return {ref.port: bool if ref.port in {*_CONTROLS, _STATE_CHANGE} else object for ref in refs}


def _check_control(node: NodeConfig) -> None:
    strangers = sorted(map(str, set(ports_of(node.side_inputs)) - _CONTROLS))
    if strangers or node.side_outputs:
        raise ContractError(f"{_NAME} has no side packet but ALLOW or DISALLOW: {', '.join(strangers)}")
    controls = [ref.port for ref in (*node.inputs, *node.side_inputs) if ref.port in _CONTROLS]
    if len(controls) > 1:
        raise ContractError(
            f"{_NAME} has one control, not {len(controls)}",
            fix="give it one input stream or side packet ALLOW or DISALLOW, or the option allow",
        )


GATE: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
