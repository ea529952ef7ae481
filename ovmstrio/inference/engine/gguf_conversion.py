"""Program that converts a GGUF file to a model folder, in a process whose exit frees the memory.

::

    first: [GGUF file, output folder]        ["loaded", {}] or ["failed", reason]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import openvino_genai as genai

from ovmstrio.inference.engine.chunk_worker import run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.inference.engine.tokenizer import lift_token_bound

if TYPE_CHECKING:
    from ovmstrio.isolation.blocking_channel import BlockingChannel


def convert(channel: BlockingChannel, number: int, value: list[str]) -> None:
    """Write a model with its tokenizers into an empty folder; the library writes them next to a link to the file."""
    source, folder = map(Path, value)
    link = folder / "model.gguf"
    try:
        link.symlink_to(source)
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        link.unlink()
        lift_token_bound(folder)
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
    else:
        channel.send([number, [LOADED, {}]])


if __name__ == "__main__":
    run_process(convert)
