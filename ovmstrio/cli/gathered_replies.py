"""Joining of the replies that a graph streams for one request."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from ovmstrio.cli.stream_text import TextReader, values_of
from ovmstrio.core.errors import ServerError
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.raw_contents import bytes_array, from_raw

if TYPE_CHECKING:
    from collections.abc import Generator

    from ovmstrio.client.api import StreamOutput, StreamReply
    from ovmstrio.core.tensor import Array


def gather(replies: Generator[StreamReply]) -> tuple[dict[str, Array], int]:
    """Read a stream to its end, and return its outputs and the largest number of pieces of an output.

    Texts are joined; other outputs with several pieces are named ``NAME[0]``, ``NAME[1]`` and so on.

    Raises:
        ServerError: the stream or the request failed.
    """
    reader = TextReader()
    texts: dict[str, list[str]] = {}
    arrays: dict[str, list[Array]] = {}
    pieces: dict[str, int] = {}
    with closing(replies):
        for reply in replies:
            if reply.error:
                raise ServerError(reply.error)
            for output in reply.outputs:
                pieces[output.name] = pieces.get(output.name, 0) + 1
                text = reader.read(output)
                if text is None:
                    arrays.setdefault(output.name, []).append(_array(output))
                else:
                    texts.setdefault(output.name, []).append(text)
    return _outputs(pieces, texts, arrays), max(pieces.values(), default=0)


def _outputs(pieces: dict[str, int], texts: dict[str, list[str]], arrays: dict[str, list[Array]]) -> dict[str, Array]:
    """Return the outputs by name, in the order of their first pieces."""
    outputs: dict[str, Array] = {}
    for name in pieces:
        if name in texts:
            outputs[name] = bytes_array(["".join(texts[name]).encode()], (1,))
        several = arrays.get(name, [])
        if len(several) == 1 and name not in texts:
            outputs[name] = several[0]
        else:
            outputs |= {f"{name}[{index}]": array for index, array in enumerate(several)}
    return outputs


def _array(output: StreamOutput) -> Array:
    if isinstance(output.data, bytes) and output.datatype in BY_NAME:
        try:
            return from_raw(output.data, output.datatype, output.shape)
        except ValueError:
            pass
    values: Any = values_of(output)
    return np.atleast_1d(np.array(values))
