"""Calls of services in other groups, through Ray's handles; on the asyncio side.

What no code of users has to do with is called once more where a replica is gone; anything else tells its caller.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from ovmstrio.core.errors import NotReady, Overloaded, ServerError
from ovmstrio.isolation.codec import decode_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle

__all__ = ["GroupLink"]

_GONE: Final = (ray_errors.RayActorError, ray_errors.ObjectLostError, serve_errors.DeploymentUnavailableError)
"""The replica is lost, or with its machine the large answer that it had left there."""
_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 0.2


class GroupLink:
    """A group of services elsewhere.

    Args:
        group: its name.
        handle: Ray's way to its replicas.
        is_repeatable: whether a call may be made once more of which nobody knows how far it came.
    """

    def __init__(self, group: str, handle: DeploymentHandle, *, is_repeatable: bool) -> None:
        self._group = group
        self._handle = handle
        self._attempts = _ATTEMPTS if is_repeatable else 1

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of one of its replicas.

        Raises:
            NotReady: there is no replica, or it has ended under the call.
            Overloaded: as many calls wait as may.
            Exception: what it raised.

        Cancellation: at once, and there, too.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._ask(method, *arguments, **options)
            except _GONE as error:
                if attempt == self._attempts:
                    raise self._lost(error) from None
                await asyncio.sleep(_PAUSE_SECONDS)
        raise AssertionError

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of one of its replicas that must not be called twice, whoever's code it has to do with.

        Raises:
            Exception: as :meth:`call`.

        Cancellation: as :meth:`call`.
        """
        try:
            return await self._ask(method, *arguments, **options)
        except _GONE as error:
            raise self._lost(error) from None

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        response = getattr(self._handle, method).remote(*arguments, **options)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except serve_errors.BackPressureError as error:
            raise Overloaded(f'the group "{self._group}" is called too often: {error.message}') from None

    def _lost(self, error: Exception) -> NotReady:
        return NotReady(f'the group "{self._group}" has lost the replica of this call: {_line(error)}')

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Call a method of one of its replicas that gives one thing after the other.

        Raises:
            NotReady: there is no replica, or it has ended under the call.
            Exception: what it raised.

        Cancellation: when the iterator is closed, there, too.
        """
        response = getattr(self._handle.options(stream=True), method).remote(*arguments)
        try:
            async for each in response:
                yield each
        except _GONE as error:
            raise self._lost(error) from None
        finally:
            response.cancel()

    async def answer(self, method: str, *arguments: Any) -> Any:
        """Call a method whose answers are pairs: whether it succeeded, and its result, or its error as plain data.

        Raises:
            ServerError: what was raised there; as :meth:`call`.

        Cancellation: as :meth:`call`.
        """
        succeeded, value = await self.call(method, *arguments)
        if succeeded:
            return value
        error = decode_error(value)
        raise error if isinstance(error, Exception) else ServerError(str(error))


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
