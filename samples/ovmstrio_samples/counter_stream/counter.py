"""The handler: the words of a text one after the other, and then how many they were."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyovms import Tensor


def read_text(tensor: Tensor) -> str:
    """Give the text of a tensor, without the length that KServe clients write before an element of BYTES."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:].decode() if prefixed else data.decode()


class OvmsPythonModel:
    """Generates: every ``yield`` is sent to the client at once."""

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Stream the words of one text; ``count`` comes last and says that nothing follows."""
        words = read_text(inputs[0]).split()
        for word in words:
            yield [Tensor("word", word.encode())]
        yield [Tensor("count", np.array([len(words)], np.int64))]
