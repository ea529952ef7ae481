"""Streams numbers."""

from collections.abc import Iterator

from pyovms import Tensor


class OvmsPythonModel:
    """One generative node whose outputs are a few bytes each."""

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Give as many outputs as the input says."""
        for number in range(int(bytes(inputs[0]))):
            yield [Tensor("out", b"%d" % number)]
