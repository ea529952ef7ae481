"""A Paddle model of this process: read, compiled, and known by its aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array
from ovmstrio.openvino.compile import ModelFile, compile_read
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.paddle import read_paddle
from ovmstrio.openvino.signature import ModelSignature, port_names
from ovmstrio.openvino.trials import Trial
from ovmstrio.runtimes.ops.predictor.model_config import (
    ModelConfig,
    Variable,
    check,
    check_fetch,
    prepare,
    read_model_config,
)
from ovmstrio.runtimes.ops.predictor.protocol import Feed

__all__ = ["LocalModel", "compile_plain", "load_local_model", "local_trial", "map_aliases"]


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


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What a model takes and gives, and how Ops name that; it does not keep what is compiled."""

    config: ModelConfig
    signature: ModelSignature

    @property
    def feed_names(self) -> list[str]:
        """The aliases of what it takes."""
        return [variable.alias for variable in self.config.feeds]

    @property
    def fetch_names(self) -> list[str]:
        """The aliases of what it gives."""
        return [variable.alias for variable in self.config.fetches]

    def arrays(self, feed: Feed, *, batch: bool) -> list[Array]:
        """Give the model's inputs in the order of its signature; see :func:`~.feeding.prepare` for what it raises."""
        return prepare(feed, self.signature.inputs, batch=batch)

    def check(self, feed: Feed) -> None:
        """Refuse a feed, with its batch axis, that does not fit; raises what :meth:`arrays` raises."""
        check(feed, self.signature.inputs, batch=True)

    def wanted(self, fetch: Sequence[str] | None) -> list[Variable]:
        """Give the outputs to fetch: those named, or all for no names.

        Raises:
            FeedMismatch: the model does not give one of them.
        """
        names = fetch or self.fetch_names
        check_fetch(names, self.fetch_names)
        by_alias = {variable.alias: variable for variable in self.config.fetches}
        return [by_alias[name] for name in names]

    def answer(self, outputs: Sequence[Array], wanted: Sequence[Variable]) -> dict[str, Array]:
        """Pick the outputs wanted, of the whole or decimal types that the configuration tells."""
        by_name = dict(zip((spec.name for spec in self.signature.outputs), outputs, strict=True))
        return {variable.alias: _declared(by_name[variable.alias], variable) for variable in wanted}


def _declared(array: Array, variable: Variable) -> Array:
    """OpenVINO computes some integers in another width than Paddle."""
    same_kind = array.dtype.kind == variable.dtype.kind
    return array.astype(variable.dtype, copy=False) if same_kind else array


def load_local_model(folder: Path, device: str, plugin_config: Mapping[str, str]) -> tuple[LocalModel, Compiled]:
    """Read and compile the model of a folder.  Blocks for as long as that takes.

    Raises:
        ConfigError: the folder holds no model that OpenVINO can run, or its configuration does not fit.
    """
    config = read_model_config(folder)
    _refuse_sequences(config, str(folder))
    model = read_paddle(folder)
    names = (_names(model.inputs, is_input=True), _names(model.outputs, is_input=False))
    mapping = map_aliases(config, *names, str(folder))
    spec = ModelSpec(name=folder.name, base_path=folder, target_device=device, plugin_config=dict(plugin_config))
    compiled = compile_read(model, ModelFile(folder, spec, mapping))
    return LocalModel(config, compiled.signature), compiled


def local_trial(folder: Path, device: str, plugin_config: Mapping[str, str]) -> Trial:
    """Make the trial of what :func:`load_local_model` would load."""
    settings = [device, dict(plugin_config)]
    return Trial(
        name=folder.name,
        path=folder,
        compile=f"{__name__}:{compile_plain.__name__}",
        argument=[str(folder), *settings],
        read="ovmstrio.openvino.paddle:read_paddle",
        source=folder,
        device=device,
        settings=settings,
    )


def compile_plain(argument: Sequence[Any]) -> Compiled:
    """Load a model of plain data, for a trial.

    Raises:
        ConfigError: as :func:`load_local_model`.
    """
    folder, device, plugin_config = argument
    _, compiled = load_local_model(Path(folder), device, plugin_config)
    return compiled


def _names(ports: Sequence[Any], *, is_input: bool) -> list[str]:
    return port_names(ports, {}, is_input=is_input)


def _refuse_sequences(config: ModelConfig, folder: str) -> None:
    """Refuse inputs with row offsets; an output is often said to have some, and comes without."""
    without = [variable.alias for variable in config.fetches if variable.lod]
    if without:
        log.warning("OpenVINO has no LoD tensors: outputs come without row offsets", model=folder, fetch=without)
    ragged = [variable.alias for variable in config.feeds if variable.lod]
    if ragged:
        message = f"OpenVINO has no LoD tensors, which {', '.join(map(repr, ragged))} are said to be"
        way_out = "export the model with padded batches; if all samples are equally long, write is_lod_tensor: false"
        raise ConfigError([Problem(message, file=folder, path="is_lod_tensor", suggestion=way_out)])
