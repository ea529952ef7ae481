"""Name the species of a flower, by the version of the model that the caller asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex_internal.lib.log import logger
from ovmstrio.ext.handlers import HTTPError

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class Handler:
    """Answers requests; the server makes one object of it in each process."""

    def __init__(self, config: dict[str, Any], model_client: Any) -> None:
        self.default = config["version"]
        self.client = model_client
        # A model that cannot be loaded is to be found at the start.
        self.client.get_model(model_version=self.default)

    def load_model(self, model_path: str) -> dict[str, Any]:
        """Load one version; called by the server, once for each."""
        fitted: dict[str, Any] = json.loads((Path(model_path) / "coefficients.json").read_text(encoding="utf-8"))
        return fitted

    def handle_post(self, payload: Any, query_params: Any) -> dict[str, Any]:
        """Classify the flower of the payload."""
        version = query_params.get("version", self.default)
        try:
            sizes = [float(payload[name]) for name in FEATURES]
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPError(400, f"expected an object of numbers: {', '.join(FEATURES)}") from error
        model = self.client.get_model(model_version=version)
        scores = [
            sum(weight * size for weight, size in zip(weights, sizes, strict=True)) + intercept
            for weights, intercept in zip(model["weights"], model["intercepts"], strict=True)
        ]
        species = model["classes"][scores.index(max(scores))]
        logger.info("classified", extra={"species": species, "version": version})
        return {"species": species, "version": version}
