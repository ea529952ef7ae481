"""Which tensor of a model each alias of its ``serving_server_conf.prototxt`` stands for."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.predictor.model_config import ModelConfig, Variable

__all__ = ["map_aliases"]

log = structlog.get_logger(__name__)


def map_aliases(config: ModelConfig, inputs: Sequence[str], outputs: Sequence[str], folder: str) -> TensorMapping:
    """Give the alias of each tensor, by the name that the model has for it.

    A variable is for the tensor of its name.  Those whose names the model has not are for the tensors left over, in
    the file's order, because Paddle's tools rename tensors as they save them.

    Raises:
        ConfigError: there are more variables than tensors, or the model takes what the file does not list.
    """
    problems: list[Problem] = []
    sides = [
        _side(variables, names, folder, "feed" if variables is config.feeds else "fetch", problems)
        for variables, names in ((config.feeds, inputs), (config.fetches, outputs))
    ]
    left_over = [name for name in inputs if name not in sides[0]]
    if left_over and not problems:
        listed = ", ".join(map(repr, left_over))
        problems.append(Problem(f"the model takes {listed} too, for which there is no feed_var", file=folder))
    if problems:
        raise ConfigError(problems)
    return TensorMapping(*sides)


def _side(
    variables: Sequence[Variable], names: Sequence[str], folder: str, side: str, problems: list[Problem]
) -> dict[str, str]:
    aliases = {variable.name: variable.alias for variable in variables if variable.name in names}
    unnamed = [variable for variable in variables if variable.name not in names]
    free = [name for name in names if name not in aliases]
    if len(unnamed) > len(free):
        listed = ", ".join(repr(variable.name) for variable in unnamed)
        message = f"the model has not as many tensors as there are {side}_var: {listed}"
        problems.append(Problem(message, file=folder, expected=", ".join(names), found=listed))
    by_position = dict(zip(free, (variable.alias for variable in unnamed), strict=False))
    if by_position:
        log.info("tensors matched by position", model=folder, side=side, aliases=by_position)
    return aliases | by_position
