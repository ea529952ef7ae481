"""``BertBaseReader``: what readers for BERT inherit."""

from __future__ import annotations

from paddle_serving_app.reader.reader import ReaderBase

__all__ = ["BertBaseReader"]


class BertBaseReader(ReaderBase):
    """Makes a model's inputs of a line."""

    def process(self, line: str | bytes) -> dict[str, list[int]]:
        """Give the inputs; subclasses say how.

        Raises:
            NotImplementedError: always, here.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how {line!r} becomes inputs")
