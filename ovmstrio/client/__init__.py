"""Typed clients of KServe v2 and OpenAI chats, over gRPC and REST.

``Client`` blocks; ``AsyncClient`` runs on trio and asyncio. Both have the same methods, whatever the protocol.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ovmstrio.client.api import (
    Health,
    InferResult,
    ModelInfo,
    ModelState,
    Parameter,
    Posted,
    SequenceState,
    ServerInfo,
    StreamOutput,
    StreamReply,
    StreamRequest,
    TensorInfo,
)
from ovmstrio.client.chat import ChatAnswer, ChatDelta, ChatMessage, ChatUsage
from ovmstrio.client.factory import open_client
from ovmstrio.client.sync_client import Client
from ovmstrio.client.tls import ClientTls
from ovmstrio.core.tensor import Array
from ovmstrio.encoding.status_errors import Unreachable

if TYPE_CHECKING:
    from ovmstrio.client.async_client import AsyncClient

__all__ = [
    "Array",
    "AsyncClient",
    "ChatAnswer",
    "ChatDelta",
    "ChatMessage",
    "ChatUsage",
    "Client",
    "ClientTls",
    "Health",
    "InferResult",
    "ModelInfo",
    "ModelState",
    "Parameter",
    "Posted",
    "SequenceState",
    "ServerInfo",
    "StreamOutput",
    "StreamReply",
    "StreamRequest",
    "TensorInfo",
    "Unreachable",
    "open_client",
]


def __getattr__(name: str) -> Any:
    # Blocking programs do without anyio.
    if name == "AsyncClient":
        return import_module(f"{__name__}.async_client").AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
