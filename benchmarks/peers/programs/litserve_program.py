"""LitServe: a LitAPI in its worker process, over its own JSON."""

from __future__ import annotations

from typing import Any

import litserve
import numpy as np
from shared_models import SETUP, Models


class ModelsApi(litserve.LitAPI):  # type: ignore[misc] # it has no types
    """All models, by the name in the request."""

    def setup(self, device: str) -> None:
        """Compile the models."""
        del device
        self.models = Models()

    def predict(self, x: dict[str, Any]) -> dict[str, Any]:
        """Infer."""
        return {"output": self.models.infer(x["model"], np.asarray(x["input"], np.float32)).tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(ModelsApi(), accelerator="cpu", workers_per_device=1)
    server.run(port=SETUP["rest"], num_api_servers=1, generate_client_file=False, log_level="error")
