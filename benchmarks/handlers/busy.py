"""Node that computes in Python for some milliseconds."""

from pyovms import Tensor


class OvmsPythonModel:
    """Node that holds the GIL all the time."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Add up numbers."""
        return [Tensor("out", b"%d" % sum(number * inputs[0].size for number in range(50_000)))]
