"""Node that returns its input."""

from pyovms import Tensor


class OvmsPythonModel:
    """Node that does nothing, to measure the overhead of the server."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the bytes under the output's name."""
        return [Tensor("out", inputs[0].data)]
