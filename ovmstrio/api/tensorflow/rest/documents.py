"""The JSON of a predict call.

NaN and infinities are taken as the words ``NaN``, ``Infinity`` and ``-Infinity``, which many clients write although
JSON has no such words.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ovmstrio.api.kserve.rest.infer_request import TOO_DEEP, as_object, parse_document
from ovmstrio.core.errors import InvalidRequest, MalformedJson

__all__ = ["read_document"]

_WORDS: Final = (b"NaN", b"Infinity")


def read_document(body: bytes) -> dict[str, Any]:
    """Read a JSON object; of a key that stands there twice the last value counts.

    Raises:
        MalformedJson: it is not JSON.
        InvalidRequest: it is no object, or too deep.
    """
    try:
        return parse_document(body)
    except MalformedJson as error:
        if not any(word in body for word in _WORDS):
            raise
        return as_object(_read_with_words(body, error))


def _read_with_words(body: bytes, refusal: MalformedJson) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None
    except ValueError:
        raise refusal from None
