"""LocalPredictor: thread-safe predictor that services and scripts create."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from ovmstrio.core.errors import FailedPrecondition
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import probe_model_from_thread
from ovmstrio.inference.network import BlockingNetwork
from ovmstrio.ops.predictor.local_model import (
    LocalModel,
    load_local_model,
    local_crash_probe,
    plugin_config,
    select_device,
)
from ovmstrio.ops.predictor.model_config import Variable
from ovmstrio.ops.settings import LocalServiceConf

log = structlog.get_logger(__name__)

_UNSUPPORTED_OPTIONS = ("use_trt", "use_lite", "use_xpu", "use_ascend_cl", "use_calib")


class LocalPredictor:
    """Predictor of a local Paddle model.

    Attributes:
        feed_names_: input aliases.
        fetch_names_: output aliases.
        feed_types_: element type numbers by input alias.
        fetch_types_: element type numbers by output alias.
        feed_shapes_: sample shapes by input alias.
        feed_names_to_idx_: positions by input alias.
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
        """Load the model of a folder; options without meaning for OpenVINO are ignored.

        Raises:
            ConfigError: the folder has no supported model.
            NotReady: the crash probe of the server failed.
        """
        given = locals()
        ignored = [name for name in _UNSUPPORTED_OPTIONS if given[name]]
        if ignored:
            log.warning("settings of unsupported devices ignored", settings=ignored, model=model_path)
        settings = LocalServiceConf(
            device_type=1 if use_gpu else 0, devices=str(gpu_id), thread_num=thread_num, precision=precision
        )
        device = select_device(settings, 0)
        wanted = (Path(model_path), device, plugin_config(settings, device, 1))
        probe_model_from_thread(local_crash_probe(*wanted))
        self._set_model(*load_local_model(*wanted))

    def _set_model(self, model: LocalModel, compiled: Compiled) -> None:
        feeds, fetches = model.config.feeds, model.config.fetches
        self.feed_names_, self.fetch_names_ = model.feed_names, model.fetch_names
        self.feed_types_ = {variable.alias: variable.kind for variable in feeds}
        self.fetch_types_ = {variable.alias: variable.kind for variable in fetches}
        self.feed_shapes_ = {variable.alias: list(variable.shape) for variable in feeds}
        self.feed_names_to_idx_ = {variable.alias: position for position, variable in enumerate(feeds)}
        self._model, self._network = model, BlockingNetwork(compiled)

    def predict(
        self,
        feed: Mapping[str, Any],
        fetch: str | Sequence[str] | None = None,
        batch: bool = False,  # noqa: FBT002 - the signature that scripts call
        log_id: int = 0,  # noqa: ARG002 - the same
    ) -> dict[str, Array]:
        """Run the model; thread-safe.

        Args:
            feed: arrays or lists of numbers by alias; lists are reshaped to the declared shape.
            fetch: requested output aliases; all if empty.
            batch: whether values have a batch axis; otherwise they are one sample.
            log_id: ignored.

        Raises:
            FailedPrecondition: no model is loaded.
            FeedMismatch: names or shapes do not match the model.
            FeedTypeError: a value has an unsupported type.
            ModelFailure: the model failed.
        """
        model, network = self._model, self._network
        if model is None or network is None:
            raise FailedPrecondition("no model is loaded: call load_model_config first")
        wanted = model.wanted([fetch] if isinstance(fetch, str) else fetch)
        declared = {variable.alias: variable for variable in model.config.feeds}
        arrays = {name: _array(value, declared.get(name), batch=batch) for name, value in feed.items()}
        return model.answer(network.infer(model.arrays(arrays, batch=batch)), wanted)


def _array(value: Any, variable: Variable | None, *, batch: bool) -> Any:
    """Convert lists of numbers to an array of the declared shape; other values are checked later."""
    if not isinstance(value, list | tuple | int | float) or variable is None or _has_text(value):
        return value
    try:
        array = np.asarray(value, variable.dtype)
        return array.reshape((-1, *variable.shape) if batch else variable.shape)
    except (TypeError, ValueError):
        return value


def _has_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, str) for each in value)
