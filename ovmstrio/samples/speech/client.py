"""Client of the sample speech: ``python -m ovmstrio.samples.speech.client --tokenizer FILE --input RECORDING...``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.asking import arguments, connect
from ovmstrio.samples.question import Ask
from ovmstrio.samples.speech.hearing import RATE, SECONDS, Tokens, log_mel
from ovmstrio.samples.vad.client import read_wave

__all__ = ["transcribe"]

_START: Final = (50_257, 50_362)
_END: Final = 50_256
_LONGEST: Final = 200


def _tokens(ask: Ask, sound: Array) -> Iterator[int]:
    """Stream the tokens of up to thirty seconds, with greedy decoding."""
    hidden = ask("speech_encoder", {"mel": log_mel(sound)})["hidden"]
    said = [*_START]
    for _ in range(_LONGEST):
        logits = ask("speech_decoder", {"input_ids": np.array([said], np.int64), "hidden": hidden})["logits"]
        token = int(logits[0, : _END + 1].argmax())
        if token == _END:
            return
        said.append(token)
        yield token


def transcribe(ask: Ask, sound: Array, tokens: Tokens) -> Iterator[str]:
    """Stream the text of a recording, FP32 at 16 kHz, in pieces."""
    for start in range(0, len(sound), SECONDS * RATE):
        for token in _tokens(ask, sound[start : start + SECONDS * RATE]):
            yield tokens.decode([token])


if __name__ == "__main__":
    table = ("--tokenizer", {"metavar": "FILE", "type": Path, "required": True, "help": "the models' tokenizer.json"})
    options = arguments("Transcribe recordings.", table, file="RECORDING", required=True)
    with connect(options) as ask_server:
        for recording in options.input:
            for piece in transcribe(ask_server, read_wave(recording), Tokens.read(options.tokenizer)):
                print(piece, end="", flush=True)
            print()
