"""Compiles the forms of answers where no text is made: what cannot be compiled fails here, and not in the batch."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13

from ovmstrio.core.generation import Sampling
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.openvino.engine.sampling import configure

if TYPE_CHECKING:
    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.openvino.engine.pipeline import Pipeline

__all__ = ["FormCompiler"]

_MODEL_FILE: Final = "openvino_model.xml"
_LOGITS: Final = "logits"
_TOKENS: Final = 2
_PROPERTIES: Final = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": 1}


class FormCompiler:
    """A pipeline of a model without weights, whose tokenizer is the batch's.

    The library keeps what is compiled of a form with the tokenizer, so that the batch finds it there.

    Args:
        pipeline: makes the texts.
        folder: of its model, whose number of logits is read when the first form comes.
    """

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._batch = pipeline
        self._file = folder / _MODEL_FILE
        self._vocabulary = 0
        self._pipeline: Any = None

    def ask(self, request: GenerationRequest) -> Any:
        """Give what :meth:`compile` is to be told of a request, in the thread that steps the batch."""
        defaults = self._batch.defaults()
        config = configure(genai.GenerationConfig(), Sampling(temperature=0), grammar=request.grammar)
        config.max_new_tokens = _TOKENS
        config.eos_token_id = defaults.eos_token_id
        config.stop_token_ids = {*defaults.stop_token_ids, *request.sampling.stop_token_ids}
        return config

    def compile(self, config: Any) -> None:
        """Make two tokens in a form, in any one thread at a time; others run meanwhile.

        Raises:
            RuntimeError: the library does not take the form.
            OSError, LookupError: no form can be tried with this model.
        """
        if self._pipeline is None:
            try:
                self._pipeline = self._make()
            except RuntimeError as error:
                # That says nothing of the form, as where a disk is full.
                raise LookupError(f"no form can be tried: {reason_of(error)}") from error
        pipeline, self._pipeline = self._pipeline, None
        pipeline.generate(ov.Tensor(np.zeros((1, 1), np.int64)), config)
        # One that has failed may be in any state.
        self._pipeline = pipeline

    def _make(self) -> Any:
        self._vocabulary = self._vocabulary or _logits_of(self._file)
        with TemporaryDirectory() as folder:
            ov.serialize(_without_weights(self._vocabulary), Path(folder) / _MODEL_FILE)
            return genai.LLMPipeline(folder, self._batch.tokenizer, "CPU", **_PROPERTIES)


def _logits_of(file: Path) -> int:
    """Read how many logits a model gives for a token, which may be more than its tokenizer knows tokens.

    Raises:
        OSError: there is no such file.
        LookupError: it does not tell.
    """
    if not file.is_file():
        raise FileNotFoundError(str(file))
    for output in ov.Core().read_model(file).outputs:
        last = output.partial_shape[-1] if output.partial_shape.rank.is_static else None
        if _LOGITS in output.names and last is not None and last.is_static:
            return int(last.get_length())
    raise LookupError(_LOGITS)


def _without_weights(vocabulary: int) -> ov.Model:
    """Give a model to which all tokens are alike."""
    ids, mask, places = (_input(name, 2, np.int64) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = _input("beam_idx", 1, np.int32)
    one = opset13.constant(np.zeros((1, 1, 1), np.float32))
    shape = opset13.concat([opset13.shape_of(ids), opset13.constant(np.array([vocabulary], np.int64))], 0)
    logits = opset13.broadcast(one, shape)
    logits.output(0).set_names({_LOGITS})
    return ov.Model([opset13.result(logits)], [ids, mask, places, beams], "forms")


def _input(name: str, rank: int, kind: Any) -> Any:
    parameter = opset13.parameter([-1] * rank, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter
