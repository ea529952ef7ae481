"""Connection to another deployment group through Ray handles.

Calls without user code are repeated after the loss of a replica; other calls fail.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from ovmstrio.core.errors import NotReady, Overloaded, ServerError
from ovmstrio.isolation.messages import decode_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle

# Calls

_REPLICA_LOST: Final = (ray_errors.RayActorError, ray_errors.ObjectLostError, serve_errors.DeploymentUnavailableError)
"""The replica is lost, or with its machine a large result stored there."""
_MAX_ATTEMPTS: Final = 5
_RETRY_DELAY_SECONDS: Final = 0.2


class GroupLink:
    """Connection to another group.

    Args:
        is_repeatable: whether calls with unknown outcome may be repeated.
    """

    def __init__(self, group: str, handle: DeploymentHandle, *, is_repeatable: bool) -> None:
        self._group = group
        self._handle = handle
        self._attempts = _MAX_ATTEMPTS if is_repeatable else 1

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a replica.

        Raises:
            NotReady: there is no replica, or it was lost during the call.
            Overloaded: the queue is full.
            Exception: the method raised it in the replica.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._invoke(method, *arguments, **options)
            except _REPLICA_LOST as error:
                if attempt == self._attempts:
                    raise self._lost(error) from None
                await asyncio.sleep(_RETRY_DELAY_SECONDS)
        raise AssertionError

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a replica without repetition.

        Raises:
            Exception: as :meth:`call`.
        """
        try:
            return await self._invoke(method, *arguments, **options)
        except _REPLICA_LOST as error:
            raise self._lost(error) from None

    async def _invoke(self, method: str, *arguments: Any, **options: Any) -> Any:
        response = getattr(self._handle, method).remote(*arguments, **options)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except serve_errors.BackPressureError as error:
            raise Overloaded(f'group "{self._group}" is overloaded: {error.message}') from None

    def _lost(self, error: Exception) -> NotReady:
        return NotReady(f'group "{self._group}" lost the replica of this call: {_first_line(error)}')

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Call a streaming method of a replica.

        Raises:
            NotReady: there is no replica, or it was lost during the call.
            Exception: the method raised it in the replica.

        Cancellation: closing the iterator cancels the call in the replica.
        """
        response = getattr(self._handle.options(stream=True), method).remote(*arguments)
        try:
            async for each in response:
                yield each
        except _REPLICA_LOST as error:
            raise self._lost(error) from None
        finally:
            response.cancel()

    async def answer(self, method: str, *arguments: Any) -> Any:
        """Call a method that returns a success flag, and a result or an encoded error.

        Raises:
            ServerError: the method failed in the replica, or as :meth:`call`.
        """
        succeeded, value = await self.call(method, *arguments)
        if succeeded:
            return value
        error = decode_error(value)
        raise error if isinstance(error, Exception) else ServerError(str(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
