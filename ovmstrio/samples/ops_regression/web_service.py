"""Service that estimates the width of a flower's petals from its other sizes, with a Paddle model of one layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_serving_server.web_service import Op, WebService


class PetalOp(Op):
    """Op that parses text like ``5.1,3.5,1.4;7.0,3.2,4.7``, the sizes (cm) of each flower, and runs the model."""

    def init_op(self) -> None:
        """Set the separators of numbers and flowers."""
        self.separator = ","
        self.batch_separator = ";"

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Return one row per flower as the model's input."""
        ((_, request),) = input_dicts.items()
        flowers = request["x"].split(self.batch_separator)
        rows = [[float(size) for size in flower.split(self.separator)] for flower in flowers]
        return {"x": np.array(rows, np.float32)}, False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Format the estimates as text."""
        return {"width": str(fetch_data["width"].tolist())}, None, ""


class PetalService(WebService):
    """Pipeline of the sample."""

    def get_pipeline_response(self, read_op: Op) -> Op:
        """Return the only Op."""
        return PetalOp(name="petal", input_ops=[read_op])


petal_service = PetalService(name="petal")
petal_service.prepare_pipeline_config("config.yml")
petal_service.run_service()
