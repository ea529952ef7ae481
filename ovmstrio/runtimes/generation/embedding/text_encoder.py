"""What embedders and rerankers have in common: a tokenizer, a model whose batches all clients share, and a life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.request import ServableMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.generation import Padding, Task, TokenRow
    from ovmstrio.runtimes.generation.embedding.row_encoder import RowEncoder
    from ovmstrio.runtimes.generation.embedding.row_texts import RowTexts

__all__ = ["MOST_DOCUMENTS", "TextEncoder"]

MOST_DOCUMENTS: Final = 500
"""How many texts one request may have, as in OVMS."""


class TextEncoder:
    """A service that has a model of texts; its batches run as long as ``rows`` serves.

    Args:
        name: what it is served as.
        task: what it does.
        texts: makes rows of texts.
        rows: makes numbers of rows.
    """

    def __init__(self, name: str, task: Task, texts: RowTexts, rows: RowEncoder) -> None:
        self.tasks: frozenset[Task] = frozenset({task})
        self.metadata = ServableMetadata(name, "OpenVINO", (), ())
        self._texts = texts
        self._rows = rows

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Do as :class:`ovmstrio.core.generation.Tokenizer`.

        Raises:
            InvalidRequest, ServerError: as there.

        Cancellation: at any checkpoint.
        """
        return await self._texts.tokenize(
            texts, add_special_tokens=add_special_tokens, max_length=max_length, padding=padding
        )

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: as :meth:`RowEncoder.aclose`.
        """
        await self._rows.aclose()
