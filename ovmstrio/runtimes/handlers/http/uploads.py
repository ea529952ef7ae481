"""Files that were uploaded in a form."""

from __future__ import annotations

from io import BytesIO
from typing import BinaryIO

import trio

from ovmstrio.core.http import Headers

__all__ = ["UploadFile"]


class UploadFile:
    """A file of a form, in memory.

    ``file`` is for plain handlers; the ``async`` methods do the same for ``async def`` ones.

    Attributes:
        filename: as the client named it.
        file: its content, open for reading from the start.
        size: of the content in bytes.
        headers: of its part of the form.
    """

    def __init__(self, content: bytes, filename: str, headers: Headers = ()) -> None:
        self.filename = filename
        self.file: BinaryIO = BytesIO(content)
        self.size = len(content)
        self.headers = dict(headers)

    @property
    def content_type(self) -> str | None:
        """What the client says the content is."""
        return self.headers.get("content-type")

    def __repr__(self) -> str:
        return f"UploadFile(filename={self.filename!r}, size={self.size}, content_type={self.content_type!r})"

    async def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes, all by default.

        Cancellation: before anything is read.
        """
        await trio.lowlevel.checkpoint()
        return self.file.read(size)

    async def seek(self, offset: int) -> None:
        """Go to a place in the content.

        Cancellation: before that.
        """
        await trio.lowlevel.checkpoint()
        self.file.seek(offset)

    async def write(self, data: bytes) -> None:
        """Change the content at the place where it is read.

        Cancellation: before that.
        """
        await trio.lowlevel.checkpoint()
        self.file.write(data)

    async def close(self) -> None:
        """Forget the content.

        Cancellation: nowhere.
        """
        self.file.close()
