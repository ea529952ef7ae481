"""The message of a number."""

from __future__ import annotations

from random import Random
from typing import Final

from tests.fuzz.grpc_doors import grpc_message, raw_http2_message
from tests.fuzz.http_doors import http_message, raw_http_message
from tests.fuzz.messages import Message

_MAKERS: Final = (grpc_message, http_message, raw_http2_message, raw_http_message)
_WEIGHTS: Final = (46, 46, 4, 4)


def make_message(number: int) -> Message:
    random = Random(number)
    (maker,) = random.choices(_MAKERS, _WEIGHTS)
    return maker(random, number)
