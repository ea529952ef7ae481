"""``WebService`` and ``Op`` for service scripts."""

from __future__ import annotations

from typing import Any, NoReturn

from ovmstrio.ext.ops import Op
from ovmstrio.ext.ops import WebService as _WebService

__all__ = ["Op", "WebService"]


class WebService(_WebService):
    """Service base class; methods of the API before pipelines raise NotImplementedError."""

    def _unsupported(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "this method serves models without a pipeline: use `ovms serve`; "
            "for a pipeline override get_pipeline_response and call prepare_pipeline_config and run_service"
        )

    load_model_config = _unsupported
    set_gpus = _unsupported
    default_rpc_service = _unsupported
    create_rpc_config = _unsupported
    prepare_server = _unsupported
    run_rpc_service = _unsupported
    run_web_service = _unsupported
    run_debugger_service = _unsupported
    get_prediction = _unsupported
    get_app_instance = _unsupported
