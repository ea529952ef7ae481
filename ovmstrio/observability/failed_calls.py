"""The calls that failed last, with where they failed; what was sent only if that was asked for at the start."""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.core.events import CANCELLED, CallObserver, kept_body_bytes
from ovmstrio.core.texts import cut, text_of
from ovmstrio.observability.blanked_secrets import blanked

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent, WireRequest

__all__ = ["FailedCall", "FailedCalls"]

_KEPT: Final = 100
_LONGEST: Final = 600
_ZLIB_OR_GZIP: Final = 47
"""What zlib calls data that say themselves which of the two they are."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """One call that failed.

    Attributes:
        number: of all that failed, from 1.
        at: when it ended, in seconds since the epoch.
        name: of the service.
        version: of the service.
        kind: of the service.
        api: whose protocol it came by.
        interface: gRPC or REST.
        method: as the protocol calls it.
        request_id: that the caller gave, or was given.
        caller: whose call it was; empty where nobody had to be known.
        code: the name of the error's class.
        node: of the service in which it failed; empty where there is none, or it failed before.
        message: what was said of it, cut at 600 characters.
        milliseconds: how long it took.
        body: the begin of what was sent, without what looks like a secret; empty where that is not kept.
        body_bytes: how long all of it was; 0 where it is not kept.
    """

    number: int
    at: float
    name: str
    version: str
    kind: str
    api: str
    interface: str
    method: str
    request_id: str
    caller: str
    code: str
    node: str
    message: str
    milliseconds: float
    body: str = ""
    body_bytes: int = 0


class FailedCalls(CallObserver):
    """Observes calls, and keeps the last hundred that failed; those that their clients left are none.

    Of what was sent it keeps what :data:`ovmstrio.core.events.kept_body_bytes` has its requests have, where there are
    requests, which is up to :meth:`request_ended` being told of them.
    """

    def __init__(self) -> None:
        self._kept: deque[FailedCall] = deque(maxlen=_KEPT)
        self.count = 0

    def since(self, number: int) -> list[FailedCall]:
        """Give those that are kept and came behind a number, oldest first."""
        return [each for each in self._kept if each.number > number]

    def call_failed(self, event: CallEvent) -> None:
        """Keep a call that failed, unless its client has left."""
        error = event.error
        if event.code == CANCELLED:
            return
        self.count += 1
        body, size = _sent(event.request)
        if error is None:
            told = event.reason or f"answered with the status {event.code}"
        else:
            told = error.message if isinstance(error, ServerError) else text_of(error)
        self._kept.append(
            FailedCall(
                number=self.count,
                at=time.time(),
                name=event.name,
                version=event.version,
                kind=event.kind,
                api=event.door.api,
                interface=event.door.interface,
                method=event.method,
                request_id=cut(event.request_id, _LONGEST),
                caller=event.caller,
                code=event.code,
                node=event.node or getattr(error, "node", ""),
                message=cut(told, _LONGEST),
                milliseconds=round(event.seconds * 1e3, 3),
                body=body,
                body_bytes=size,
            )
        )

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        """Leave that to others."""
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        """What a call was asked with has been kept at its end."""


def _sent(request: WireRequest | None) -> tuple[str, int]:
    """Give what is kept of what was sent, and how long all of it was."""
    if request is None or not request.body:
        return "", 0
    kept, size = request.body, max(request.received, len(request.body))
    if request.header("content-encoding").strip().lower() not in {"", "identity"}:
        # Whoever sees what is compressed could read it, and nothing that is secret can be told in it.
        try:
            kept = zlib.decompressobj(_ZLIB_OR_GZIP).decompress(kept, max(kept_body_bytes.get(), len(kept)))
        except zlib.error:
            return "(compressed, and cannot be read)", size
    return blanked(kept, request.headers)[: len(kept)], size
