"""A model's inputs and outputs as callers see them: mapped names, datatypes, shapes, batch axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import openvino as ov

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import ANY_SIZE, BY_OPENVINO_NAME, BYTES, Dim, TensorSpec

__all__ = ["ModelSignature", "dims_of", "for_ports", "own_specs", "port_names", "read_signature", "to_partial_shape"]

# ----------------------------------------------------------------------
# A model's inputs and outputs as callers see them: mapped names, datatypes, shapes, batch axes
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs sorted by name, each with the position of its port in the model.

    ``extra`` is what the model's file says of itself (``rt_info``), fit for JSON; ``unranked_outputs`` are the
    positions of outputs of which not even the number of dimensions is known; ``labels`` name classes.
    """

    inputs: tuple[TensorSpec, ...]
    input_ports: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    output_ports: tuple[int, ...]
    extra: dict[str, Any]
    unranked_outputs: frozenset[int] = frozenset()
    labels: tuple[str, ...] = ()

    @property
    def has_fixed_inputs(self) -> bool:
        """Whether every input accepts one shape only."""
        return all(dim.is_fixed for spec in self.inputs for dim in spec.shape)

    @property
    def depends_on_values(self) -> bool:
        """Whether inputs of one shape have outputs of many: how large they are is in the values."""
        return self.has_fixed_inputs and not all(dim.is_fixed for spec in self.outputs for dim in spec.shape)

    @property
    def has_fixed_outputs(self) -> bool:
        """Whether every output has so many bytes whatever is inferred: one shape only, and no strings."""
        is_ranked = not self.unranked_outputs
        return is_ranked and all(
            spec.datatype is not BYTES and all(dim.is_fixed for dim in spec.shape) for spec in self.outputs
        )

    @property
    def output_bytes(self) -> int:
        """How many bytes the outputs of fixed shapes have together."""
        ranked = (
            spec
            for port, spec in zip(self.output_ports, self.outputs, strict=True)
            if port not in self.unranked_outputs
        )
        fixed = (spec for spec in ranked if all(dim.is_fixed for dim in spec.shape))
        return sum(spec.datatype.itemsize * prod(dim.low for dim in spec.shape) for spec in fixed)


def port_names(ports: Sequence[Any], aliases: Mapping[str, str], *, is_input: bool) -> list[str]:
    """Name each port: its alias, else any name the model gives it, else (outputs) ``out_<index>``."""
    names = []
    for index, port in enumerate(ports):
        known = sorted(port.get_names())
        alias = next((aliases[name] for name in known if name in aliases), None)
        names.append(alias or _own_name(port, known, is_input=is_input) or f"out_{index}")
    return names


def _own_name(port: Any, known: list[str], *, is_input: bool) -> str:
    """Give an input's name, also where an output is the same tensor and has a name of its own for it."""
    source = port.node if is_input else port.node.input_value(0).get_node()
    name = str(source.friendly_name)
    if source.get_type_name() != "Parameter" or name not in known:
        return known[0] if known else name if is_input else ""
    others = [other for other in known if other != name]
    return name if is_input or not others else others[0]


def dims_of(shape: ov.PartialShape, unknown: tuple[Dim, ...] = (ANY_SIZE,)) -> tuple[Dim, ...]:
    """Give a shape of OpenVINO's, for one of unknown rank ``unknown``."""
    if shape.rank.is_dynamic:
        return unknown
    return tuple(Dim(dim.get_min_length(), dim.get_max_length()) for dim in shape)


def to_partial_shape(dims: Sequence[Dim]) -> ov.PartialShape:
    """Give OpenVINO's form of a shape."""
    return ov.PartialShape([ov.Dimension(dim.low, dim.high) for dim in dims])


def read_signature(model: ov.Model, mapping: TensorMapping, file: str) -> ModelSignature:
    """Describe a model.

    Raises:
        ConfigError: it has no outputs, two tensors of one name, or a tensor that no protocol can carry.
    """
    problems = [] if model.outputs else [Problem("the model has no outputs", file=file)]
    inputs, input_ports = _side(model.inputs, mapping.inputs, file, problems, is_input=True)
    outputs, output_ports = _side(model.outputs, mapping.outputs, file, problems, is_input=False)
    if problems:
        raise ConfigError(problems)
    unranked = frozenset(index for index, port in enumerate(model.outputs) if port.get_partial_shape().rank.is_dynamic)
    return ModelSignature(inputs, input_ports, outputs, output_ports, _extra(model), unranked)


def own_specs(ports: Sequence[Any], *, is_input: bool) -> tuple[TensorSpec, ...]:
    """Describe ports under the model's own names, in its order; their types are ones that protocols carry."""
    return tuple(_spec(name, port) for name, port in zip(port_names(ports, {}, is_input=is_input), ports, strict=True))


def _side(
    ports: Sequence[Any], aliases: Mapping[str, str], file: str, problems: list[Problem], *, is_input: bool
) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    kind = "input" if is_input else "output"
    names = port_names(ports, aliases, is_input=is_input)
    problems.extend(
        Problem(f"two {kind}s are called {name!r}", file=file, suggestion="rename them in mapping_config.json")
        for name in sorted({name for name in names if names.count(name) > 1})
    )
    specs = []
    for index, (name, port) in enumerate(zip(names, ports, strict=True)):
        type_name = port.get_element_type().get_type_name()
        if type_name not in BY_OPENVINO_NAME:
            problems.append(
                Problem(f"{kind} {name!r} has the element type {type_name}, which no protocol carries", file=file)
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
    # An output of unknown rank is shown as one dimension of any size; the answer's own shape is exact.
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


def _extra(model: ov.Model) -> dict[str, Any]:
    if not model.has_rt_info("model_info"):
        return {}
    return {"rt_info": {"model_info": _plain(model.get_rt_info("model_info"))}}


def _plain(value: Any) -> Any:
    held = getattr(value, "value", value)
    if isinstance(held, Mapping):
        return {str(key): _plain(inner) for key, inner in held.items()}
    if isinstance(held, (list, tuple)):
        return [_plain(inner) for inner in held]
    return held if isinstance(held, (str, int, float, bool)) else str(held)


# ----------------------------------------------------------------------
# Bring settings that users wrote by tensor name to the tensors of the model that they are for
# ----------------------------------------------------------------------

_T = TypeVar("_T")


def for_ports(
    option: str,
    settings: Mapping[str, _T],
    names: Sequence[str],
    aliases: Mapping[str, str],
    *,
    origin: str = "",
    anonymous_everywhere: bool = False,
) -> dict[int, _T]:
    """Give each setting with the position of the tensor that it is for.

    Args:
        option: the name of the option, for messages.
        settings: by tensor name; the name ``""`` is for the only tensor.
        names: what callers call the tensors, by position.
        aliases: the alias of each tensor that has one, by its name in the model's file.
        origin: where the settings were written, for messages.
        anonymous_everywhere: a setting without a name may be for several tensors.

    Raises:
        ConfigError: a name is unknown or was replaced by an alias, or a setting without a name has several tensors.
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
