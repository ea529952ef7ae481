"""Name the species of a flower with a classifier that scikit-learn has fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib

from ovmstrio.ext.handlers import HTTPError

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")
SPECIES = ("setosa", "versicolor", "virginica")


class Handler:
    """Answers requests; the server keeps the versions of the model as they are in the folder."""

    def __init__(self, model_client: Any) -> None:
        self.client = model_client

    def load_model(self, model_path: str) -> Any:
        """Load one version; called by the server, once for each and again when its files change."""
        return joblib.load(Path(model_path) / "model.joblib")

    def handle_post(self, payload: Any, query_params: Any) -> dict[str, Any]:
        """Classify the flower of the payload."""
        try:
            sizes = [float(payload[name]) for name in FEATURES]
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPError(400, f"expected an object of numbers: {', '.join(FEATURES)}") from error
        model = self.client.get_model(model_version=query_params.get("version"))
        (label,) = model.predict([sizes])
        return {"species": SPECIES[label], "by": type(model).__name__}
