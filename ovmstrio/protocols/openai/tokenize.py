"""Endpoint ``/tokenize``: token ids of a text, in OVMS's API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import trio

from ovmstrio.core.errors import ErrorList, NotSupported
from ovmstrio.core.generation import Padding, Tokenizer
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.protocols.openai.fields import Fields, shown
from ovmstrio.protocols.openai.known_fields import TOKENIZE
from ovmstrio.transport.http.responses import JSON_TYPE
from ovmstrio.util.truncation import MAX_ITEMS, MAX_TOKENIZED_CHARACTERS, cut, weight_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.generation import TokenRow
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_MAX_INLINE_TOKENS: Final = 50_000  # Token count that is encoded within a few milliseconds


class _ParsedRequest(NamedTuple):
    texts: Sequence[str]
    is_list: bool
    add_special_tokens: bool
    max_length: int | None
    padding: Padding | None


def tokenize_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def tokenize(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, TOKENIZE)
        parsed = _read(body.document)
        with await api.call(request, body.model, None) as call:
            service = call.service
            if not isinstance(service, Tokenizer):
                raise NotSupported(f'the service "{cut(body.model, 80)}" has no tokenizer')
            rows = await service.tokenize(
                parsed.texts,
                add_special_tokens=parsed.add_special_tokens,
                max_length=parsed.max_length,
                padding=parsed.padding,
            )
            write = partial(_write, rows, is_list=parsed.is_list)
            is_large = sum(map(len, rows)) > _MAX_INLINE_TOKENS
            content = await trio.to_thread.run_sync(write) if is_large else write()
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    return api.rules("/tokenize", "POST", tokenize)


def _write(rows: Sequence[TokenRow], *, is_list: bool) -> bytes:
    """Encode the response; many tokens are encoded in several short calls."""
    pieces = [b'{"tokens":[' if is_list else b'{"tokens":']
    for number, row in enumerate(rows):
        pieces.append(b"," if number else b"")
        pieces += array_pieces(np.asarray(row, np.int64))
    pieces.append(b"]}" if is_list else b"}")
    return b"".join(pieces)


def _read(document: Mapping[str, Any]) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    given = fields.get("text")
    texts = _read_texts(fields, given)
    adds = fields.flag("add_special_tokens")
    max_length = fields.unsigned("max_length", minimum=1)
    pads = fields.flag("pad_to_max_length")
    side = fields.name_text("padding_side")
    if side is not None and side not in {each.value for each in Padding}:
        fields.refuse("padding_side", "padding_side should be either left or right", got=shown(side))
    if pads and max_length is not None and max_length * len(texts) > MAX_TOKENIZED_CHARACTERS:
        message = f"max_length: expected at most {MAX_TOKENIZED_CHARACTERS} tokens per request, including padding"
        fields.refuse("max_length", message, got=str(max_length * len(texts)))
    TOKENIZE.check(fields)
    errors.tell()
    padding = Padding(side or Padding.RIGHT.value) if pads else None
    return _ParsedRequest(texts, isinstance(given, list), adds is not False, max_length, padding)


def _read_texts(fields: Fields, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if given is None:
        fields.refuse("text", "text field is required", code="missing_required_parameter")
    elif not isinstance(texts, list):
        fields.refuse("text", "text should be string or array of strings", got=shown(given))
    elif len(texts) > MAX_ITEMS:
        fields.refuse("text", f"text: expected at most {MAX_ITEMS} texts", got=str(len(texts)))
    elif not all(isinstance(each, str) for each in texts):
        fields.refuse("text", "text should be string or array of strings", got=shown(given))
    elif (size := sum(map(weight_of, texts))) > MAX_TOKENIZED_CHARACTERS:
        message = f"text: expected at most {MAX_TOKENIZED_CHARACTERS} bytes per request"
        fields.refuse("text", message, got=f"{size}; send several requests")
    else:
        return texts
    return []
