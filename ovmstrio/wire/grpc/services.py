"""What generated services need beside their own code to be at home on trio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

__all__ = ["TrioService"]


class TrioService:
    """Mix-in for services that betterproto2 generates, placed before the generated base.

    A response generator is closed as soon as its call ends. The generated code would leave a cancelled one to the
    garbage collector, and with it whatever the generator has open.
    """

    async def _call_rpc_handler_server_stream(self, handler: Callable[..., Any], stream: Any, request: Any) -> None:
        responses = handler(request)
        if not isinstance(responses, AsyncGenerator):
            async for response in responses:
                await stream.send_message(response)
            return
        async with aclosing(responses):
            async for response in responses:
                await stream.send_message(response)
