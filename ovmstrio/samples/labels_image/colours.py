"""Python node that returns the label, a colour name, nearest to a picture's mean colour."""

from __future__ import annotations

import numpy as np
from PIL import ImageColor

from pyovms import Context, Tensor, current_context


def read_text(tensor: Tensor) -> str:
    """Return the text of a tensor, without the length prefix that KServe clients write before a BYTES element."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:].decode() if prefixed else data.decode()


class OvmsPythonModel:
    """Node that keeps the labels of each stream in the storage of its graph instance."""

    def open(self, context: Context) -> None:
        """Initialise an instance without labels."""
        context.storage["labels"] = {}

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Store labels or label a picture; labels alone get no response."""
        storage = current_context().storage
        outputs = []
        for tensor in inputs:
            if tensor.name == "labels":
                names = [name.strip() for name in read_text(tensor).split(",")]
                storage["labels"] = {name: ImageColor.getrgb(name)[:3] for name in names}
            else:
                outputs.append(Tensor("result", self._nearest(np.asarray(tensor), storage["labels"]).encode()))
        return outputs

    def _nearest(self, picture: np.ndarray, labels: dict[str, tuple[int, ...]]) -> str:
        if not labels:
            raise ValueError("send labels before the first image")
        mean = picture.reshape(-1, 3).mean(axis=0)
        return min(labels, key=lambda name: float(np.square(mean - labels[name]).sum()))
