"""``/tokenize``: the numbers of a text's tokens, as OVMS's clients ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.api.openai.fields import Fields, shown
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Padding, Tokenizer
from ovmstrio.wire.http.answers import json_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["tokenize_rules"]

_MANY: Final = 50_000
"""Tokens that are written within a few milliseconds."""


class _Asked(NamedTuple):
    """Texts, whether they came as a list, and how they are tokenized."""

    texts: Sequence[str]
    is_list: bool
    add_special_tokens: bool
    max_length: int | None
    padding: Padding | None


def tokenize_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules."""

    async def tokenize(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request)
        asked = _read(body.document)
        with await api.call(request, body.model, None) as call:
            service = call.service
            if not isinstance(service, Tokenizer):
                raise NotSupported(f'the service "{body.model[:80]}" has no tokenizer that could be asked')
            rows = await service.tokenize(
                asked.texts,
                add_special_tokens=asked.add_special_tokens,
                max_length=asked.max_length,
                padding=asked.padding,
            )
            document = {"tokens": rows if asked.is_list else rows[0]}
            is_large = sum(map(len, rows)) > _MANY
            answer = await trio.to_thread.run_sync(json_answer, document) if is_large else json_answer(document)
            call.event.sent = len(answer.content)
        return answer

    return api.rules("/tokenize", "POST", tokenize)


def _read(document: Mapping[str, Any]) -> _Asked:
    """Read a body.

    Raises:
        InvalidField: it is not what it should be; of several things that are wrong all are told.
    """
    wrong = Gathered()
    fields = Fields(document, wrong)
    given = fields.get("text")
    texts = _read_texts(fields, given)
    adds = fields.flag("add_special_tokens")
    max_length = fields.unsigned("max_length", least=1)
    pads = fields.flag("pad_to_max_length")
    side = fields.text("padding_side")
    if side is not None and side not in {each.value for each in Padding}:
        fields.refuse("padding_side", "padding_side should be either left or right", got=shown(side))
    wrong.tell()
    padding = Padding(side or Padding.RIGHT.value) if pads else None
    return _Asked(texts, isinstance(given, list), adds is not False, max_length, padding)


def _read_texts(fields: Fields, given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    if given is None:
        fields.refuse("text", "text field is required", code="missing_required_parameter")
    elif isinstance(given, list) and all(isinstance(each, str) for each in given):
        return given
    else:
        fields.refuse("text", "text should be string or array of strings", got=shown(given))
    return []
