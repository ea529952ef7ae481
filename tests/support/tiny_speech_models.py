"""Tiny speech models in the formats of SpeechT5, Kokoro and Piper; tests decode the letters from signal levels.

SpeechT5 speaks :data:`T5_SAMPLES` for each byte of a text, all as loud as the mean of the speaker's embedding; Kokoro
and Piper speak a level for each phoneme, which is its number in parts of :data:`LEVELS`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as op

from tests.support import ir
from tests.support.model_cache import cached_folder
from tests.support.onnx_files import OnnxNode, OnnxValue, onnx_graph

LEVELS: Final = 256
T5_RATE: Final = 16_000
T5_SAMPLES: Final = 512
PIPER_RATE: Final = 16_000
PIPER_SAMPLES: Final = 64

_MELS: Final = 80
_FRAMES: Final = 2
_EMBEDDING: Final = 512
_KOKORO_EMBEDDING: Final = (510, 1, 256)
_KOKORO_SAMPLES: Final = 240
_KOKORO_PHONEMES: Final = "h\u0259l\u02c8O. "
_END: Final = "<|endoftext|>"
_LETTERS: Final = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'"

Numbers = np.ndarray[Any, np.dtype[np.float32]]


def heard_letters(samples: Numbers, *, length: float = 1.0) -> str:
    levels = samples[:: round(PIPER_SAMPLES * length)] * LEVELS
    return "".join(_LETTERS[round(level) - 3] for level in levels.tolist() if round(level) >= 3)


# SpeechT5


@cached_folder("ovmstrio.samples.transcription.byte_tokenizer", "tests.support.ir")
def write_tiny_speecht5(folder: Path) -> Path:
    """Write the model with its tokenizer and a voice ``loud`` in ``voices``."""
    folder.mkdir(parents=True, exist_ok=True)
    for make, name in ((_encoder, "encoder_model"), (_decoder, "decoder_model"), (_postnet, "postnet")):
        ov.save_model(make(), folder / f"openvino_{name}.xml", compress_to_fp16=False)
    ov.save_model(_vocoder(), folder / "openvino_vocoder.xml", compress_to_fp16=False)
    config = {"architectures": ["SpeechT5ForTextToSpeech"], "reduction_factor": _FRAMES, "num_mel_bins": _MELS}
    (folder / "config.json").write_text(json.dumps(config))
    # As many steps of two frames as there are tokens.
    (folder / "generation_config.json").write_text(json.dumps({"maxlenratio": 2.0, "minlenratio": 0.0}))
    (folder / "voices").mkdir()
    write_voice(folder / "voices" / "loud.bin", 0.75, (_EMBEDDING,))
    _write_tokenizer(folder)
    return folder


def write_voice(path: Path, level: float, shape: tuple[int, ...] = (_EMBEDDING,)) -> Path:
    """Write the file of a voice that speaks as loud as ``level``."""
    path.write_bytes(np.full(shape, level, np.float32).tobytes())
    return path


def _encoder() -> ov.Model:
    ids = ir.parameter("input_ids", [-1, -1], "INT64")
    hidden = op.multiply(op.unsqueeze(op.convert(ids, np.float32), np.array([2])), np.ones((1, 1, 4), np.float32))
    mask = op.convert(op.greater_equal(ids, np.int64(0)), np.int64)
    return ir.named_model({"last_hidden_state": hidden, "encoder_attention_mask": mask}, [ids])


def _decoder() -> ov.Model:
    inputs = [
        ir.parameter("inputs_embeds", [-1, -1, _MELS], "FP32"),
        ir.parameter("speaker_embeddings", [-1, _EMBEDDING], "FP32"),
        ir.parameter("encoder_hidden_states", [-1, -1, 4], "FP32"),
        ir.parameter("encoder_attention_mask", [-1, -1], "INT64"),
        ir.parameter("beam_idx", [-1], "INT32"),
    ]
    before, speaker, hidden, mask, beams = inputs
    zeros: Any = op.multiply(op.reduce_mean(hidden, np.array([1, 2])), np.float32(0))
    for each in (mask, beams):
        whole = op.reduce_sum(op.convert(each, np.float32), np.arange(len(each.get_partial_shape())))
        zeros = op.add(zeros, op.multiply(whole, np.float32(0)))
    level = op.add(op.reduce_mean(speaker, np.array([1]), keep_dims=True), zeros)
    spectrum = op.multiply(op.unsqueeze(level, np.array([2])), np.ones((1, _FRAMES, _MELS), np.float32))
    one = np.array([1])
    follows = op.concat([before, op.slice(spectrum, one, np.array([2]), one, one)], 1)
    never = op.multiply(op.reduce_mean(spectrum, np.array([2])), np.float32(0))
    return ir.named_model({"output_sequence_out": follows, "spectrum": spectrum, "prob": never}, inputs)


def _postnet() -> ov.Model:
    raw = ir.parameter("raw_spectrogram", [-1, -1, -1, _MELS], "FP32")
    ordered = op.transpose(raw, np.array([1, 0, 2, 3]))
    flat = op.reshape(ordered, np.array([1, -1, _MELS]), special_zero=False)
    return ir.named_model({"postnet_spectrogram": flat}, [raw])


def _vocoder() -> ov.Model:
    frames = ir.parameter("spectrogram", [-1, -1, _MELS], "FP32")
    levels = op.reduce_mean(frames, np.array([2]), keep_dims=True)
    sound = op.multiply(levels, np.ones((1, 1, T5_SAMPLES // _FRAMES), np.float32))
    return ir.named_model({"waveform": op.reshape(sound, np.array([-1]), special_zero=False)}, [frames])


def _write_tokenizer(folder: Path) -> None:
    letters = [chr(256 + byte) if byte < 33 or 126 < byte < 161 or byte == 173 else chr(byte) for byte in range(256)]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    added = [{"id": len(letters), "content": _END, "special": True}]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    table = folder / "tokenizer.json"
    table.write_text(json.dumps({"added_tokens": added, "model": model, "decoder": {"type": "ByteLevel"}}))
    # The package of tokenizers changes what every core of a process does that imports it.
    command = [sys.executable, "-m", "ovmstrio.samples.transcription.byte_tokenizer", str(table), str(folder)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


# Kokoro


def write_tiny_kokoro(folder: Path) -> Path:
    """Write a model that knows how ``hello`` is spoken, and the voice ``anna``."""
    ids, style, speed = (
        ir.parameter("input_ids", [1, -1], "INT64"),
        ir.parameter("ref_s", [1, 256], "FP32"),
        ir.parameter("speed", [1], "FP32"),
    )
    levels = op.unsqueeze(op.divide(op.convert(ids, np.float32), np.float32(LEVELS)), np.array([2]))
    loud = op.multiply(levels, op.reduce_mean(style, np.array([0, 1])))
    length = op.convert(op.divide(np.float32(_KOKORO_SAMPLES), speed), np.int64)
    sound = op.broadcast(loud, op.concat([np.array([1, 1]), length], 0), broadcast_spec="BIDIRECTIONAL")
    (folder / "voices").mkdir(parents=True)
    waveform = op.reshape(sound, np.array([-1]), special_zero=False)
    model = ir.named_model({"waveform": waveform}, [ids, style, speed])
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    vocabulary = {letter: number for number, letter in enumerate(_KOKORO_PHONEMES, 1)}
    config = {"vocab": vocabulary, "plbert": {"max_position_embeddings": 512}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_voice(folder / "voices" / "anna.bin", 1.0, _KOKORO_EMBEDDING)
    (folder / "data").mkdir()
    for name in ("us_gold", "us_silver", "gb_gold", "gb_silver"):
        (folder / "data" / f"{name}.json").write_text(json.dumps({"hello": _KOKORO_PHONEMES[:5]}), encoding="utf-8")
    return folder


# Piper


def write_tiny_piper(folder: Path, *, speakers: dict[str, int] | None = None, **settings: Any) -> Path:
    """Write a voice that speaks letters, with changed settings; each speaker is a level louder than the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [
        OnnxValue("input", "int64", ("one", "letters")),
        OnnxValue("input_lengths", "int64", ("one",)),
        OnnxValue("scales", "float32", (3,)),
    ]
    if speakers:
        inputs.append(OnnxValue("sid", "int64", ("one",)))
    output = OnnxValue("output", "float32", ("one", 1, 1, "samples"))
    (folder / "tiny.onnx").write_bytes(onnx_graph(_piper_nodes(bool(speakers)), inputs, [output], _PIPER_CONSTANTS))
    numbers = {mark: [number] for number, mark in enumerate("_^$")}
    numbers |= {letter: [number] for number, letter in enumerate(_LETTERS, 3)}
    # A mark that is not heard.
    numbers = {name: [0] if name in "_^$" else number for name, number in numbers.items()}
    config = {
        "audio": {"sample_rate": PIPER_RATE},
        "inference": {"noise_scale": 0.0, "length_scale": 1.0, "noise_w": 0.0},
        "phoneme_type": "text",
        "phoneme_id_map": numbers,
        "speaker_id_map": speakers or {},
        "language": {"code": "en_US", "family": "en"},
        "dataset": "dora",
        **settings,
    }
    (folder / "tiny.onnx.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


_PIPER_CONSTANTS: Final[dict[str, np.ndarray[Any, Any]]] = {
    "second": np.array([1], np.int64),
    "per_letter": np.array([PIPER_SAMPLES], np.float32),
    "ones": np.array([1, 1], np.int64),
    "last": np.array([2], np.int64),
    "flat": np.array([1, 1, 1, -1], np.int64),
    "levels": np.array(LEVELS, np.float32),
}


def _piper_nodes(has_speakers: bool) -> list[OnnxNode]:
    number = "number"
    nodes = [
        OnnxNode("Gather", ("scales", "second"), "length"),
        OnnxNode("Mul", ("length", "per_letter"), "samples_of_one"),
        OnnxNode("Cast", ("samples_of_one",), "count", {"to": 7}),
        OnnxNode("Concat", ("ones", "count"), "shape", {"axis": 0}),
        OnnxNode("Cast", ("input",), number, {"to": 1}),
    ]
    if has_speakers:
        nodes += [OnnxNode("Cast", ("sid",), "speaker", {"to": 1}), OnnxNode("Add", (number, "speaker"), "higher")]
        number = "higher"
    return [
        *nodes,
        OnnxNode("Div", (number, "levels"), "level"),
        OnnxNode("Unsqueeze", ("level", "last"), "column"),
        OnnxNode("Expand", ("column", "shape"), "block"),
        OnnxNode("Reshape", ("block", "flat"), "output"),
    ]
