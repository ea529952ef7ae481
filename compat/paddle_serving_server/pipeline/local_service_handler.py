"""``LocalServiceHandler``, which is not supported."""

from __future__ import annotations

from typing import Any

__all__ = ["LocalServiceHandler"]


class LocalServiceHandler:
    """Not supported: the model of an Op is set in ``local_service_conf`` and runs in the server."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "LocalServiceHandler is not supported: set the model in the Op's local_service_conf "
            "with client_type: local_predictor"
        )
