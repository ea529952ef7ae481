"""BentoML service with one API, run in threads of its only worker, over BentoML's JSON."""

from typing import Any

import bentoml
import numpy as np
from shared_models import Models


@bentoml.service(workers=1)
class ModelService:
    """Service of all models, selected by the name in the request."""

    def __init__(self) -> None:
        self.models = Models()

    @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
    def predict(self, model: str, input: list[list[Any]]) -> list[list[float]]:  # noqa: A002 - the field's name
        """Infer."""
        answer: list[list[float]] = self.models.infer(model, np.asarray(input, np.float32)).tolist()
        return answer
