"""Returns its input."""

from pyovms import Tensor


class OvmsPythonModel:
    """One node that does nothing, so that what is around it can be measured."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Give the bytes back under the output's name."""
        return [Tensor("out", inputs[0].data)]
