"""``WebService`` and ``Op``, as service scripts import them."""

from __future__ import annotations

from typing import Any, NoReturn

from ovmstrio.ext.ops import Op
from ovmstrio.ext.ops import WebService as _WebService

__all__ = ["Op", "WebService"]


class WebService(_WebService):
    """A service; the methods of the time before pipelines say that they are gone."""

    def _is_gone(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "this method serves models without a pipeline, which ovmstrio does with `ovms serve`; "
            "a pipeline overrides get_pipeline_response and calls prepare_pipeline_config and run_service"
        )

    load_model_config = _is_gone
    set_gpus = _is_gone
    default_rpc_service = _is_gone
    create_rpc_config = _is_gone
    prepare_server = _is_gone
    run_rpc_service = _is_gone
    run_web_service = _is_gone
    run_debugger_service = _is_gone
    get_prediction = _is_gone
    get_app_instance = _is_gone
