from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paddle_serving_app.reader
from paddle_serving_app.reader import image_reader

NAMES = {
    "image_reader": (
        "ImageReader File2Image URL2Image Base64ToImage String2Image Sequential Lambda Normalize Div CenterCrop Resize "
        "ResizeByFactor PadStride Transpose RGB2BGR BGR2RGB DetectionFile2Image DetectionSequential DetectionNormalize "
        "DetectionTranspose DetectionResize DetectionBGR2RGB DetectionPadStride DetectionDiv SegPostprocess "
        "RCNNPostprocess BlazeFacePostprocess DBPostProcess FilterBoxes GetRotateCropImage SortedBoxes "
        "generate_colormap"
    ),
    "functional": "transpose normalize crop resize",
    "ocr_reader": "OCRReader CharacterOps BaseRecLabelDecode CTCLabelDecode",
    "pptsn_reader": "VideoDecoder Sampler Scale TenCrop Image2Array Normalization",
    "lac_reader": "LACReader load_kv_dict",
    "senta_reader": "SentaReader",
    "imdb_reader": "IMDBDataset",
    "chinese_bert_reader": "ChineseBertReader",
    "bert_base_reader": "BertBaseReader",
    "reader": "ReaderBase",
    "batching": "pad_batch_data prepare_batch_data",
    "tokenization": (
        "FullTokenizer CharTokenizer BasicTokenizer WordpieceTokenizer convert_to_unicode printable_text load_vocab "
        "convert_by_vocab convert_tokens_to_ids convert_ids_to_tokens whitespace_tokenize"
    ),
}
WITHOUT_OPENCV = """
import sys
sys.modules["cv2"] = None
from paddle_serving_app.reader import ChineseBertReader, LACReader, SentaReader
from paddle_serving_app.reader.imdb_reader import IMDBDataset
try:
    from paddle_serving_app.reader import Resize
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("module", NAMES)
def test_names_that_scripts_import(module: str) -> None:
    """Every module has the names that scripts take from it."""
    found = import_module(f"paddle_serving_app.reader.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_a_star_brings_all_readers() -> None:
    """``from paddle_serving_app.reader import *`` has the names of the modules, each the same object."""
    everything: dict[str, object] = {}
    exec("from paddle_serving_app.reader import *", everything)
    public = {name for module in ("image_reader", "pptsn_reader") for name in NAMES[module].split()}
    public -= {"generate_colormap"}
    public |= {"OCRReader", "LACReader", "SentaReader", "IMDBDataset", "ChineseBertReader"}
    assert set(everything) - {"__builtins__"} == public == set(paddle_serving_app.reader.__all__)
    assert everything["Resize"] is image_reader.Resize
    assert public <= set(dir(paddle_serving_app.reader))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = paddle_serving_app.reader.Nothing


def test_text_is_read_without_opencv(tmp_path: Path) -> None:
    """Readers of text need no OpenCV, and those of images name the extra that brings it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WITHOUT_OPENCV]
    told = subprocess.run(
        command, check=True, cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True
    ).stdout
    assert "readers of images need OpenCV; install it: " in told
    assert "[paddle]" in told
