"""Bodies of HTTP responses that the server reads as a client."""

from __future__ import annotations

import httpx


async def read_limited(response: httpx.Response, max_bytes: float) -> bytearray:
    """Return the body of a streamed response, or a beginning of it with more than ``max_bytes``.

    Raises:
        httpx.HTTPError: the connection failed.
    """
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            if len(body) > max_bytes:
                continue
            body += chunk
            if len(body) > max_bytes:
                # The iteration ends with an error after the data that httpx has read. A break would leave the
                # generators of httpx to the garbage collector.
                await response.aclose()
    except httpx.HTTPError:
        if len(body) <= max_bytes:
            raise
    return body
