"""Message classes in a private pool, because another copy of them may be loaded in the same process."""

from ovmstrio.encoding.messages import REQUEST as Request  # noqa: N811 - names of messages
from ovmstrio.encoding.messages import RESPONSE as Response  # noqa: N811 - as above
from ovmstrio.encoding.messages import TENSOR as Tensor  # noqa: N811 - as above

__all__ = ["Request", "Response", "Tensor"]
