"""From what a handler gives back to the bytes of a reply."""

from __future__ import annotations

from typing import Any, Final

import structlog
from google.protobuf.message import EncodeError

from ovmstrio.runtimes.handlers.grpc import Rpc, WrongReplyError

__all__ = ["WRONG_REPLY", "serialised"]

log = structlog.get_logger(__name__)

WRONG_REPLY: Final = "Failed to serialize response!"
"""What the caller is told when a handler gives back something else than the RPC declares."""


def serialised(rpc: Rpc, reply: Any) -> bytes:
    """Serialise a reply, in whatever thread it was made; the handler may change the message afterwards.

    Raises:
        WrongReplyError: it is not a message of the type that the RPC declares, or lacks required fields.
    """
    expected = rpc.reply_class.DESCRIPTOR.full_name
    if not isinstance(reply, rpc.reply_class):
        log.error("a handler's reply is of the wrong type", rpc=rpc.path, expected=expected, found=_kind(reply))
        raise WrongReplyError
    try:
        data: bytes = reply.SerializeToString()
    except EncodeError as error:
        log.error("a handler's reply cannot be serialised", rpc=rpc.path, expected=expected, error=str(error))  # noqa: TRY400 - the traceback is the server's own
        raise WrongReplyError from None
    return data


def _kind(reply: Any) -> str:
    descriptor = getattr(reply, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", None) or type(reply).__name__
