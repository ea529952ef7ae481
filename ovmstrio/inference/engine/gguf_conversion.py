"""The program that makes a folder of a GGUF file: in a process of its own, whose end gives back the memory.

::

    first: [GGUF file, folder to be made beside a link to it]        ["loaded", {}] or ["failed", reason]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import openvino_genai as genai

from ovmstrio.inference.engine.chunk_worker import run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED
from ovmstrio.inference.engine.pipeline import reason_of

if TYPE_CHECKING:
    from ovmstrio.isolation.blocking_channel import BlockingChannel

__all__ = ["convert"]


def convert(channel: BlockingChannel, number: int, value: list[str]) -> None:
    """Write a model with its tokenizer and detokenizer into an empty folder: the library puts them beside a link."""
    source, folder = map(Path, value)
    link = folder / "model.gguf"
    try:
        link.symlink_to(source)
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        link.unlink()
    except Exception as error:  # noqa: BLE001 - whatever it is, the server says why there is no model
        channel.send([number, [FAILED, reason_of(error)]])
    else:
        channel.send([number, [LOADED, {}]])


if __name__ == "__main__":
    run_process(convert)
