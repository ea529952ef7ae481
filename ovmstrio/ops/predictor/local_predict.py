"""The predictor that services and scripts make themselves; any thread may call it, and several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from ovmstrio.core.errors import FailedPrecondition
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import try_model_from_thread
from ovmstrio.inference.network import BlockingNetwork
from ovmstrio.ops.predictor.local_model import LocalModel, device_for, load_local_model, local_trial, plugin_config
from ovmstrio.ops.predictor.model_config import Variable
from ovmstrio.ops.settings import LocalServiceConf

__all__ = ["LocalPredictor"]

log = structlog.get_logger(__name__)

_OF_OTHER_DEVICES = ("use_trt", "use_lite", "use_xpu", "use_ascend_cl", "use_calib")


class LocalPredictor:
    """A Paddle model of this process.

    Attributes:
        feed_names_: the aliases of what it takes.
        fetch_names_: the aliases of what it gives.
        feed_types_: the number of each alias's element type.
        fetch_types_: the same of what it gives.
        feed_shapes_: the shape of a sample of each alias.
        feed_names_to_idx_: the position of each alias.
    """

    def __init__(self) -> None:
        self.feed_names_: list[str] = []
        self.fetch_names_: list[str] = []
        self.feed_types_: dict[str, int] = {}
        self.fetch_types_: dict[str, int] = {}
        self.feed_shapes_: dict[str, list[int]] = {}
        self.feed_names_to_idx_: dict[str, int] = {}
        self._model: LocalModel | None = None
        self._network: BlockingNetwork | None = None

    def load_model_config(  # noqa: PLR0917 - the signature that scripts call
        self,
        model_path: str,
        use_gpu: bool = False,  # noqa: FBT002 - as callers know it
        gpu_id: int = 0,
        use_profile: bool = False,  # noqa: FBT002 - as callers know it
        thread_num: int = 1,
        mem_optim: bool = True,  # noqa: FBT002 - as callers know it
        ir_optim: bool = False,  # noqa: FBT002 - as callers know it
        use_trt: bool = False,  # noqa: FBT002 - as callers know it
        use_lite: bool = False,  # noqa: FBT002 - as callers know it
        use_xpu: bool = False,  # noqa: FBT002 - as callers know it
        precision: str = "fp32",
        use_mkldnn: bool = False,  # noqa: FBT002 - as callers know it
        mkldnn_cache_capacity: int = 0,
        mkldnn_op_list: Sequence[str] | None = None,
        mkldnn_bf16_op_list: Sequence[str] | None = None,
        use_feed_fetch_ops: bool = False,  # noqa: FBT002 - as callers know it
        use_ascend_cl: bool = False,  # noqa: FBT002 - as callers know it
        min_subgraph_size: int = 3,
        dynamic_shape_info: Mapping[str, Any] | None = None,
        use_calib: bool = False,  # noqa: FBT002 - as callers know it
    ) -> None:
        """Load the model of a folder; what OpenVINO has no use for is accepted and does nothing.

        Raises:
            ConfigError: the folder holds no model that OpenVINO can run.
            NotReady: in a server, where it is tried first, it could not be.
        """
        given = locals()
        useless = [name for name in _OF_OTHER_DEVICES if given[name]]
        if useless:
            log.warning("settings of other devices are ignored", settings=useless, model=model_path)
        settings = LocalServiceConf(
            device_type=1 if use_gpu else 0, devices=str(gpu_id), thread_num=thread_num, precision=precision
        )
        device = device_for(settings, 0)
        wanted = (Path(model_path), device, plugin_config(settings, device, 1))
        try_model_from_thread(local_trial(*wanted))
        self._take(*load_local_model(*wanted))

    def _take(self, model: LocalModel, compiled: Compiled) -> None:
        feeds, fetches = model.config.feeds, model.config.fetches
        self.feed_names_, self.fetch_names_ = model.feed_names, model.fetch_names
        self.feed_types_ = {variable.alias: variable.kind for variable in feeds}
        self.fetch_types_ = {variable.alias: variable.kind for variable in fetches}
        self.feed_shapes_ = {variable.alias: list(variable.shape) for variable in feeds}
        self.feed_names_to_idx_ = {variable.alias: place for place, variable in enumerate(feeds)}
        self._model, self._network = model, BlockingNetwork(compiled)

    def predict(
        self,
        feed: Mapping[str, Any],
        fetch: str | Sequence[str] | None = None,
        batch: bool = False,  # noqa: FBT002 - the signature that scripts call
        log_id: int = 0,  # noqa: ARG002 - the same
    ) -> dict[str, Array]:
        """Infer.

        Args:
            feed: arrays or lists of numbers by alias; lists get the declared shape.
            fetch: the aliases of what is wanted; without any, everything.
            batch: whether the values have a batch axis already; otherwise they are one sample.
            log_id: of no effect.

        Raises:
            FailedPrecondition: no model is loaded yet.
            FeedMismatch: names or shapes are not those of the model.
            FeedTypeError: a value is nothing that the model takes.
            ModelFailure: the model failed.
        """
        model, network = self._model, self._network
        if model is None or network is None:
            raise FailedPrecondition("no model is loaded: call load_model_config first")
        wanted = model.wanted([fetch] if isinstance(fetch, str) else fetch)
        declared = {variable.alias: variable for variable in model.config.feeds}
        whole = {name: _array(value, declared.get(name), batch=batch) for name, value in feed.items()}
        return model.answer(network.infer(model.arrays(whole, batch=batch)), wanted)


def _array(value: Any, variable: Variable | None, *, batch: bool) -> Any:
    """Make an array of the declared shape out of a list of numbers; what cannot be one is left to be refused."""
    if not isinstance(value, list | tuple | int | float) or variable is None or _has_text(value):
        return value
    try:
        array = np.asarray(value, variable.dtype)
        return array.reshape((-1, *variable.shape) if batch else variable.shape)
    except (TypeError, ValueError):
        return value


def _has_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, str) for each in value)
