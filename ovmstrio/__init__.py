"""A model server for OpenVINO whose every request is a trio nursery.

What is here is loaded when it is asked for first: ``import ovmstrio`` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ovmstrio.client.api import Client
    from ovmstrio.client.connect import open_client
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
    from ovmstrio.core.servable import Servable, Service
    from ovmstrio.core.tensor import Array, Tensor, TensorSpec
    from ovmstrio.observability.logs import configure_logs
    from ovmstrio.runtimes.kind import Kind, LoadContext, Takes
    from ovmstrio.runtimes.table import KINDS, Kinds, table_of
    from ovmstrio.server.life import serve
    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings

__all__ = [
    "KINDS",
    "Array",
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
    "Takes",
    "Tensor",
    "TensorSpec",
    "configure_logs",
    "open_client",
    "serve",
    "table_of",
]

_HOMES: Final = {
    "KINDS": "runtimes.table",
    "Array": "core.tensor",
    "Client": "client.api",
    "ClientTls": "client.tls",
    "InferRequest": "core.request",
    "InferResponse": "core.request",
    "Kind": "runtimes.kind",
    "Kinds": "runtimes.table",
    "LoadContext": "runtimes.kind",
    "Running": "server.running",
    "Servable": "core.servable",
    "ServableMetadata": "core.request",
    "ServerSettings": "server.settings",
    "Service": "core.servable",
    "Takes": "runtimes.kind",
    "Tensor": "core.tensor",
    "TensorSpec": "core.tensor",
    "configure_logs": "observability.logs",
    "open_client": "client.connect",
    "serve": "server.life",
    "table_of": "runtimes.table",
}
"""The modules of the names above."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
