"""Models whose weights and activations become int8, by NNCF and samples of what comes in."""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import openvino as ov

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.core.texts import text_of
from ovmstrio.openvino.conversion.calibration import read_calibration
from ovmstrio.openvino.conversion.sources import refused
from ovmstrio.openvino.signature import own_specs

__all__ = ["quantize"]

_QUANTIZED: Final = "FakeQuantize"


def quantize(source: Path, model: ov.Model, samples: Path) -> tuple[ov.Model, int]:
    """Make a model of int8 where that loses little.  Blocks for an inference a sample and more.

    Args:
        source: what the model was read from, for messages.
        model: may be changed.
        samples: a folder of ``.npy`` files (:func:`~.calibration.read_calibration`).

    Returns:
        The model, and how many samples it was calibrated with.

    Raises:
        ConfigError: NNCF is not installed, samples do not fit, or nothing of the model can be quantized.
    """
    if importlib.util.find_spec("nncf") is None:
        raise refused(source, "quantization needs nncf", way_to_install(Extra.QUANTIZE))
    if not model.inputs:
        raise refused(source, "the model has no inputs that samples could be of", "leave out --quantize")
    calibration = read_calibration(samples, own_specs(model.inputs, is_input=True))
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nncf: Any = importlib.import_module("nncf")
        nncf.set_log_level(logging.CRITICAL)
        dataset = nncf.Dataset(calibration.samples, calibration.arrays)
        try:
            quantized: ov.Model = nncf.quantize(model, dataset, subset_size=len(calibration.samples))
        except ConfigError:
            raise
        except Exception as error:
            # What NNCF makes of models that it was not written for is of any class.
            raise refused(source, f"NNCF cannot quantize it: {text_of(error)}") from error
    if not any(node.get_type_name() == _QUANTIZED for node in quantized.get_ops()):
        raise refused(source, "NNCF found nothing in the model that int8 is of use for", "leave out --quantize")
    return quantized, len(calibration.samples)
