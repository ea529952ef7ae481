"""A model server for OpenVINO whose every request is a trio nursery.

Each public name is imported at its first use, so ``import ovmstrio`` itself is fast.
"""

from __future__ import annotations

from importlib import import_module

# An interrupt during the imports of this module is not handled yet, so the module does without ``typing``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from ovmstrio.client.async_client import AsyncClient
    from ovmstrio.client.factory import open_client
    from ovmstrio.client.sync_client import Client
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
    from ovmstrio.core.service import Servable, Service
    from ovmstrio.core.tensor import Array, Tensor, TensorSpec
    from ovmstrio.server.kinds import KINDS, Kinds, table_of
    from ovmstrio.server.running import Running
    from ovmstrio.server.server import serve
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.server.target import settings_of
    from ovmstrio.serving.kind import CallType, Kind, LoadContext
    from ovmstrio.telemetry.logs import configure_logs

__all__ = [
    "KINDS",
    "Array",
    "AsyncClient",
    "CallType",
    "Client",
    "ClientTls",
    "InferRequest",
    "InferResponse",
    "Kind",
    "Kinds",
    "LoadContext",
    "Running",
    "Servable",
    "ServableMetadata",
    "ServerSettings",
    "Service",
    "Tensor",
    "TensorSpec",
    "configure_logs",
    "open_client",
    "serve",
    "settings_of",
    "table_of",
]

_HOMES: Final = {
    "KINDS": "server.kinds",
    "Array": "core.tensor",
    "AsyncClient": "client.async_client",
    "CallType": "serving.kind",
    "Client": "client.sync_client",
    "ClientTls": "client.tls",
    "InferRequest": "core.request",
    "InferResponse": "core.request",
    "Kind": "serving.kind",
    "Kinds": "server.kinds",
    "LoadContext": "serving.kind",
    "Running": "server.server",
    "Servable": "core.service",
    "ServableMetadata": "core.request",
    "ServerSettings": "server.settings",
    "Service": "core.service",
    "Tensor": "core.tensor",
    "TensorSpec": "core.tensor",
    "configure_logs": "telemetry.logs",
    "open_client": "client.factory",
    "serve": "server.server",
    "settings_of": "server.target",
    "table_of": "server.kinds",
}
"""The modules of the names above."""


def __getattr__(name: str) -> Any:
    if name == "Takes":
        return import_module("ovmstrio.util.deprecation").forward_names(__name__, __name__, {name: "CallType"})(name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
