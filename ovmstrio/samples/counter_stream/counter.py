"""Python node that streams the words of a text, and finally their number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyovms import Tensor


def read_text(tensor: Tensor) -> str:
    """Return the text of a tensor, without the length prefix that KServe clients write before a BYTES element."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:].decode() if prefixed else data.decode()


class OvmsPythonModel:
    """Generator node: the server sends each yielded output at once."""

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Stream the words of one text; ``count`` is the last response."""
        words = read_text(inputs[0]).split()
        for word in words:
            yield [Tensor("word", word.encode())]
        yield [Tensor("count", np.array([len(words)], np.int64))]
