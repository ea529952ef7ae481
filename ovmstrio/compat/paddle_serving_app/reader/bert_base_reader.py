"""``BertBaseReader``, the base of BERT readers."""

from __future__ import annotations

from paddle_serving_app.reader.reader import ReaderBase

__all__ = ["BertBaseReader"]


class BertBaseReader(ReaderBase):
    """Base of readers that convert a line to model inputs."""

    def process(self, line: str | bytes) -> dict[str, list[int]]:
        """Return the inputs of a line; override this.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{type(self).__name__}.process is not implemented (line {line!r})")
