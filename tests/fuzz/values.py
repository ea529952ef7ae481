"""Values that have broken programs before, and changes of bytes."""

from __future__ import annotations

from random import Random
from typing import Final

NAMES: Final = (
    *("model", "dag", "graph", "handler", "ops", "strings", "dynamic", "stateful"),
    *("b", "a", "in", "out", "x", "y", "strings", "BYTES", "FP32", "INT64", "UINT8", "1", "serving_default"),
    *("sequence_id", "sequence_control_input", "binary_data", "binary_data_size", "OVMS_MP_TIMESTAMP"),
    *("classification", "inference.GRPCInferenceService", "grpc.health.v1.Health"),
    "tensorflow.serving.PredictionService",
)
"""Words that the server knows, in places where it may not expect them."""
NUMBERS: Final = (
    *(0, 1, 2, 3, 10, -1, -2, 127, 128, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30),
)
TEXTS: Final = (
    *("", " ", "\0", "\n", "\r\n", "%s%n", "../../etc/passwd", "a" * 300, "a" * 5000),
    *("null", "NaN", "-1", "0", "1e400", "{}", "[]", "<a>", "'\";--", "\\", "/", "//", "%00", "%2e%2e", "+"),
    *("é", "\u202e", "\U0001f600", "\x7f", "\ufeff"),
)
_BYTES: Final = (b"", b"\0", b"\xff", b"\xff" * 8, b"\x80" * 10, b"\0" * 64, b"\r\n", b"\n", b"{", b'"', b"[" * 100)


def text(random: Random) -> str:
    """Choose a word or a text."""
    return random.choice(NAMES if random.random() < 0.6 else TEXTS)


def changed_bytes(random: Random, data: bytes, changes: int = 3) -> bytes:
    """Flip, cut, insert, repeat or swap some of the bytes."""
    given = bytearray(data)
    for _ in range(random.randint(1, changes)):
        at = random.randrange(len(given) + 1)
        end = min(len(given), at + random.choice((1, 1, 2, 4, 8, 64)))
        match random.randrange(7):
            case 0 if at < len(given):
                given[at] ^= 1 << random.randrange(8)
            case 1 if at < len(given):
                given[at] = random.randrange(256)
            case 2:
                given[at:at] = random.choice(_BYTES)
            case 3:
                del given[at:end]
            case 4:
                given[at:at] = given[at:end] * random.choice((1, 2, 16))
            case 5:
                del given[at:]
            case _:
                given[at:end] = random.randbytes(end - at)
    return bytes(given)
