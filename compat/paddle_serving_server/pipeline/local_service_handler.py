"""``LocalServiceHandler``, which started model servers beside a pipeline."""

from __future__ import annotations

from typing import Any

__all__ = ["LocalServiceHandler"]


class LocalServiceHandler:
    """Has no use here: an Op's model is named in ``local_service_conf`` and runs in the server itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "LocalServiceHandler is not supported: name the model in the Op's local_service_conf "
            "with client_type: local_predictor"
        )
