"""Node that streams numbers at intervals."""

import time
from collections.abc import Iterator

from pyovms import Tensor

SECONDS = 0.002


class OvmsPythonModel:
    """Generative node whose outputs come one by one, each of which wakes the server."""

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield as many outputs as the input says."""
        for number in range(int(bytes(inputs[0]))):
            time.sleep(SECONDS)
            yield [Tensor("out", b"%d" % number)]
