"""Node that streams numbers."""

from collections.abc import Iterator

from pyovms import Tensor


class OvmsPythonModel:
    """Generative node with outputs of a few bytes each."""

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield as many outputs as the input says."""
        for number in range(int(bytes(inputs[0]))):
            yield [Tensor("out", b"%d" % number)]
