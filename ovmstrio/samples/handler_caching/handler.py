"""Handler that scores the mood of a text, with one model per language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.ext.handlers import HTTPError


class Handler:
    """Handler with models that are loaded on demand; the least recently used ones are evicted."""

    def __init__(self, model_client: Any) -> None:
        self.client = model_client
        self.loads: list[str] = []

    def load_model(self, model_path: str) -> dict[str, int]:
        """Load the words of a language."""
        self.loads.append(Path(model_path).parent.name)
        words = json.loads((Path(model_path) / "words.json").read_text(encoding="utf-8"))
        return {word: value for value, mood in ((1, "good"), (-1, "bad")) for word in words[mood]}

    def handle_post(self, payload: Any) -> dict[str, Any]:
        """Sum up the scores of the words in a text."""
        try:
            language, text = str(payload["language"]), str(payload["text"])
        except (KeyError, TypeError) as error:
            raise HTTPError(400, 'expected {"language": ..., "text": ...}') from error
        try:
            values = self.client.get_model(language)
        except UserRuntimeException as error:
            raise HTTPError(404, str(error)) from error
        words = (word.strip(".,;:!?\"'").lower() for word in text.split())
        return {"language": language, "mood": sum(values.get(word, 0) for word in words)}

    def handle_get(self) -> dict[str, Any]:
        """Return the loaded models, in order."""
        return {"loads": list(self.loads)}
