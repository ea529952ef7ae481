"""Model signatures: mapped names, datatypes, shapes and batch axes of inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import openvino as ov

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import ANY_SIZE, BY_OPENVINO_NAME, BYTES, Dim, TensorSpec


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs sorted by name, each with the position of its port in the model."""

    inputs: tuple[TensorSpec, ...]
    input_ports: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    output_ports: tuple[int, ...]
    extra: dict[str, Any]  # JSON-compatible ``rt_info`` of the model file
    unranked_outputs: frozenset[int] = frozenset()  # positions of outputs of unknown rank
    labels: tuple[str, ...] = ()  # class names

    @property
    def has_fixed_inputs(self) -> bool:
        """Return whether every input accepts one shape only."""
        return all(dim.is_fixed for spec in self.inputs for dim in spec.shape)

    @property
    def depends_on_values(self) -> bool:
        """Return whether output shapes depend on input values."""
        return self.has_fixed_inputs and not all(dim.is_fixed for spec in self.outputs for dim in spec.shape)

    @property
    def has_fixed_outputs(self) -> bool:
        """Return whether every output has a fixed size in bytes."""
        is_ranked = not self.unranked_outputs
        return is_ranked and all(
            spec.datatype is not BYTES and all(dim.is_fixed for dim in spec.shape) for spec in self.outputs
        )

    @property
    def output_bytes(self) -> int:
        """Total size of the outputs of fixed shape."""
        ranked = (
            spec
            for port, spec in zip(self.output_ports, self.outputs, strict=True)
            if port not in self.unranked_outputs
        )
        fixed = (spec for spec in ranked if all(dim.is_fixed for dim in spec.shape))
        return sum(spec.datatype.itemsize * prod(dim.low for dim in spec.shape) for spec in fixed)


def port_names(ports: Sequence[Any], aliases: Mapping[str, str], *, is_input: bool) -> list[str]:
    """Return the name of each port: its alias, else a name from the model, else ``out_<index>`` for outputs."""
    names = []
    for index, port in enumerate(ports):
        known = sorted(port.get_names())
        alias = next((aliases[name] for name in known if name in aliases), None)
        names.append(alias or _own_name(port, known, is_input=is_input) or f"out_{index}")
    return names


def _own_name(port: Any, known: list[str], *, is_input: bool) -> str:
    """Return the input's name; if an output is the same tensor, its own name for it."""
    source = port.node if is_input else port.node.input_value(0).get_node()
    name = str(source.friendly_name)
    if source.get_type_name() != "Parameter" or name not in known:
        return known[0] if known else name if is_input else ""
    others = [other for other in known if other != name]
    return name if is_input or not others else others[0]


def dims_of(shape: ov.PartialShape, unknown: tuple[Dim, ...] = (ANY_SIZE,)) -> tuple[Dim, ...]:
    """Convert a partial shape; ``unknown`` is returned for one of unknown rank."""
    if shape.rank.is_dynamic:
        return unknown
    return tuple(Dim(dim.get_min_length(), dim.get_max_length()) for dim in shape)


def to_partial_shape(dims: Sequence[Dim]) -> ov.PartialShape:
    """Convert dimensions to OpenVINO's partial shape."""
    return ov.PartialShape([ov.Dimension(dim.low, dim.high) for dim in dims])


def read_signature(model: ov.Model, mapping: TensorMapping, file: str) -> ModelSignature:
    """Read the signature of a model.

    Raises:
        ConfigError: the model has no outputs, duplicate tensor names, or a tensor that no protocol supports.
    """
    problems = [] if model.outputs else [Problem("the model has no outputs", file=file)]
    inputs, input_ports = _side(model.inputs, mapping.inputs, file, problems, is_input=True)
    outputs, output_ports = _side(model.outputs, mapping.outputs, file, problems, is_input=False)
    if problems:
        raise ConfigError(problems)
    unranked = frozenset(index for index, port in enumerate(model.outputs) if port.get_partial_shape().rank.is_dynamic)
    key = "model_info"
    extra = {"rt_info": {key: _plain(model.get_rt_info(key))}} if model.has_rt_info(key) else {}
    return ModelSignature(inputs, input_ports, outputs, output_ports, extra, unranked)


def model_specs(ports: Sequence[Any], *, is_input: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of ports in model order, under the model's own names; element types must be supported."""
    return tuple(_spec(name, port) for name, port in zip(port_names(ports, {}, is_input=is_input), ports, strict=True))


def _side(
    ports: Sequence[Any], aliases: Mapping[str, str], file: str, problems: list[Problem], *, is_input: bool
) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    kind = "input" if is_input else "output"
    names = port_names(ports, aliases, is_input=is_input)
    problems.extend(
        Problem(f"two {kind}s are named {name!r}", file=file, suggestion="rename them in mapping_config.json")
        for name in sorted({name for name in names if names.count(name) > 1})
    )
    specs = []
    for index, (name, port) in enumerate(zip(names, ports, strict=True)):
        type_name = port.get_element_type().get_type_name()
        if type_name not in BY_OPENVINO_NAME:
            problems.append(
                Problem(f"{kind} {name!r} has the element type {type_name}, which no protocol supports", file=file)
            )
        elif is_input and port.get_partial_shape().rank.is_dynamic:
            problems.append(
                Problem(f"input {name!r} has no fixed number of dimensions", file=file, suggestion="set its shape")
            )
        else:
            specs.append((_spec(name, port), index))
    specs.sort(key=lambda pair: pair[0].name)
    return tuple(spec for spec, _ in specs), tuple(index for _, index in specs)


def _spec(name: str, port: Any) -> TensorSpec:
    # An output of unknown rank is reported as one dimension of any size; responses have the exact shape.
    dims = dims_of(port.get_partial_shape())
    layout = port.node.layout
    text = "" if layout.empty or str(layout) == "[...]" else str(layout).strip("[]").replace(",", "")
    return TensorSpec(
        name, BY_OPENVINO_NAME[port.get_element_type().get_type_name()], dims, _batch_axis(text, len(dims)), text
    )


def _batch_axis(layout: str, rank: int) -> int | None:
    if not layout:
        return 0 if rank else None
    before, dots, after = layout.partition("...")
    if "N" in before:
        return before.index("N")
    if dots and "N" in after:
        return rank - len(after) + after.index("N")
    return None


def _plain(value: Any) -> Any:
    held = getattr(value, "value", value)
    if isinstance(held, Mapping):
        return {str(key): _plain(inner) for key, inner in held.items()}
    if isinstance(held, (list, tuple)):
        return [_plain(inner) for inner in held]
    return held if isinstance(held, (str, int, float, bool)) else str(held)


_T = TypeVar("_T")


def settings_by_port(
    option: str,
    settings: Mapping[str, _T],
    names: Sequence[str],
    aliases: Mapping[str, str],
    *,
    origin: str = "",
    anonymous_everywhere: bool = False,
) -> dict[int, _T]:
    """Map settings by tensor name to tensor positions.

    The name ``""`` is for the only tensor, or with ``anonymous_everywhere`` for all. ``names`` are tensor names by
    position, ``aliases`` the alias by the name in the model's file, ``option`` and ``origin`` are for messages.

    Raises:
        ConfigError: a name is unknown or replaced by an alias, or a setting without a name is ambiguous.
    """
    found: dict[int, _T] = {}
    problems: list[Problem] = []
    for name, setting in settings.items():
        if name in names:
            found[names.index(name)] = setting
        elif name:
            problems.append(_unknown(option, name, names, aliases, origin))
        elif len(names) == 1 or anonymous_everywhere:
            found.update(dict.fromkeys(range(len(names)), setting))
        else:
            message = f"{option} is given without a tensor name, but the model has {len(names)}: {', '.join(names)}"
            problems.append(Problem(message, file=origin, path=option, suggestion=f'write {{"{names[0]}": ...}}'))
    if problems:
        raise ConfigError(problems)
    return found


def _unknown(option: str, name: str, names: Sequence[str], aliases: Mapping[str, str], origin: str) -> Problem:
    if name in aliases:
        message = f"{option} uses the name {name!r}, which mapping_config.json replaces"
        return Problem(message, file=origin, path=option, suggestion=f"write {aliases[name]!r}")
    return Problem(
        f"{option} names a tensor that the model does not have",
        file=origin,
        path=option,
        expected=" or ".join(map(repr, names)),
        found=repr(name),
        suggestion=did_you_mean(name, names),
    )
