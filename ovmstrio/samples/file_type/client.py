"""Client of the sample file_type: ``python -m ovmstrio.samples.file_type.client [--input FILE...]``."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.file_type.prepare import installed_files
from ovmstrio.samples.question import Arrays, Question

__all__ = ["ask_about", "features", "labels", "questions"]

_HALF: Final = 1024
_BLOCK: Final = 4096
_PADDING: Final = 256


def features(content: bytes) -> Array:
    """Return the model's input, INT32 [1,2048]: the first and last 1,024 bytes of the content, stripped of white space.

    Shorter content is padded between the two halves with 256, which is not a byte value.
    """
    first = content[:_BLOCK].lstrip()[:_HALF]
    last = content[-_BLOCK:].rstrip()[-_HALF:]
    row = np.full(2 * _HALF, _PADDING, np.int32)
    row[: len(first)] = np.frombuffer(first, np.uint8)
    row[2 * _HALF - len(last) :] = np.frombuffer(last, np.uint8)
    return row[np.newaxis]


@cache
def labels() -> tuple[str, ...]:
    """Load the names of the 214 kinds, in the order of the model's output."""
    files = installed_files()
    if files is None:
        raise FileNotFoundError(f"the names of the kinds come with magika: {install_command(Extra.SAMPLES)}")
    return tuple(json.loads((files / "config.min.json").read_text(encoding="utf-8"))["target_labels_space"])


def _read(outputs: Arrays) -> str:
    return labels()[int(outputs["target_label"].reshape(-1).argmax())]


def ask_about(subject: str, content: bytes, expected: str = "") -> Question:
    """Create the call for one file."""
    return Question("file_type", subject, {"bytes": features(content)}, expected, _read)


def _png() -> bytes:
    """Encode a PNG of 64 x 64 pixels with the standard library."""
    side = 64
    rows = b"".join(b"\0" + bytes(((x * y + 3 * x) % 256) for x in range(3 * side)) for y in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def _json() -> bytes:
    flowers = [
        {"species": "iris", "petals": {"length": n / 10, "width": n / 20}, "seen": n % 2 == 0} for n in range(30)
    ]
    return json.dumps({"flowers": flowers, "unit": "cm"}, indent=2).encode()


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30))
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("flowers.json", _json())
        archive.writestr("picture.png", _png())
    return buffer.getvalue()


def questions() -> list[Question]:
    """Return calls for generated files and for files of every Python installation."""
    source = Path(json.__file__).read_bytes()
    return [
        ask_about("a PNG drawn just now", _png(), "png"),
        ask_about("Python's json/__init__.py", source, "python"),
        ask_about("a JSON document", _json(), "json"),
        ask_about("an array saved by numpy", _npy(), "npy"),
        ask_about("an archive of these", _zip(), "zip"),
    ]


if __name__ == "__main__":
    options = arguments("Detect the kinds of files.", model="file_type", file="FILE")
    calls = [ask_about(str(path), path.read_bytes()) for path in options.input]
    main(options, calls or questions())
