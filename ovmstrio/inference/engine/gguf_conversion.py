"""Program that converts a GGUF file to a model folder, in a process whose exit frees the memory.

::

    first: [GGUF file, output folder]        ["loaded", {}] or ["failed", reason]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import openvino_genai as genai

from ovmstrio.inference.engine.chunk_worker import run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.inference.engine.tokenizer import lift_token_bound

if TYPE_CHECKING:
    from ovmstrio.isolation.blocking_channel import BlockingChannel

_MODEL_FILE: Final = "openvino_model.xml"
_NO_DEVICE: Final = "NONE"


def write_files(source: Path) -> None:
    """Write a model and its tokenizers next to a GGUF file.

    The library has no call that writes a model without compiling it, which takes as long as the rest. So the device is
    one that does not exist: the library looks for it after it has written the files.

    Raises:
        RuntimeError: the file cannot be read, or the others cannot be written.
    """
    tokenizer = genai.Tokenizer(str(source), enable_save_ov_model=True)
    try:
        # With the other attention backend, the library would write the model a second time.
        genai.LLMPipeline(str(source), tokenizer, _NO_DEVICE, enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
    except RuntimeError as error:
        if f'"{_NO_DEVICE}"' not in str(error):
            raise
    if not (source.parent / _MODEL_FILE).is_file():
        genai.LLMPipeline(str(source), tokenizer, "CPU", enable_save_ov_model=True)


def convert(channel: BlockingChannel, number: int, value: list[str]) -> None:
    """Write a model with its tokenizers into an empty folder, next to a link to the file."""
    source, folder = map(Path, value)
    link = folder / "model.gguf"
    try:
        link.symlink_to(source)
        write_files(link)
        link.unlink()
        lift_token_bound(folder)
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
    else:
        channel.send([number, [LOADED, {}]])


if __name__ == "__main__":
    run_process(convert)
