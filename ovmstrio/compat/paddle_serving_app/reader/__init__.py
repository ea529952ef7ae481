"""Image and text readers of Paddle Serving's services, imported on first access.

Text readers need only numpy; the others also need OpenCV, from the extra ``paddle``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paddle_serving_app.reader.chinese_bert_reader import ChineseBertReader
    from paddle_serving_app.reader.image_reader import (
        BGR2RGB,
        RGB2BGR,
        Base64ToImage,
        BlazeFacePostprocess,
        CenterCrop,
        DBPostProcess,
        DetectionBGR2RGB,
        DetectionDiv,
        DetectionFile2Image,
        DetectionNormalize,
        DetectionPadStride,
        DetectionResize,
        DetectionSequential,
        DetectionTranspose,
        Div,
        File2Image,
        FilterBoxes,
        GetRotateCropImage,
        ImageReader,
        Lambda,
        Normalize,
        PadStride,
        RCNNPostprocess,
        Resize,
        ResizeByFactor,
        SegPostprocess,
        Sequential,
        SortedBoxes,
        String2Image,
        Transpose,
        URL2Image,
    )
    from paddle_serving_app.reader.imdb_reader import IMDBDataset
    from paddle_serving_app.reader.lac_reader import LACReader
    from paddle_serving_app.reader.ocr_reader import OCRReader
    from paddle_serving_app.reader.pptsn_reader import (
        Image2Array,
        Normalization,
        Sampler,
        Scale,
        TenCrop,
        VideoDecoder,
    )
    from paddle_serving_app.reader.senta_reader import SentaReader

__all__ = [
    "BGR2RGB",
    "RGB2BGR",
    "Base64ToImage",
    "BlazeFacePostprocess",
    "CenterCrop",
    "ChineseBertReader",
    "DBPostProcess",
    "DetectionBGR2RGB",
    "DetectionDiv",
    "DetectionFile2Image",
    "DetectionNormalize",
    "DetectionPadStride",
    "DetectionResize",
    "DetectionSequential",
    "DetectionTranspose",
    "Div",
    "File2Image",
    "FilterBoxes",
    "GetRotateCropImage",
    "IMDBDataset",
    "Image2Array",
    "ImageReader",
    "LACReader",
    "Lambda",
    "Normalization",
    "Normalize",
    "OCRReader",
    "PadStride",
    "RCNNPostprocess",
    "Resize",
    "ResizeByFactor",
    "Sampler",
    "Scale",
    "SegPostprocess",
    "SentaReader",
    "Sequential",
    "SortedBoxes",
    "String2Image",
    "TenCrop",
    "Transpose",
    "URL2Image",
    "VideoDecoder",
]

_MODULES: Final = {
    "ChineseBertReader": "chinese_bert_reader",
    "IMDBDataset": "imdb_reader",
    "LACReader": "lac_reader",
    "OCRReader": "ocr_reader",
    "SentaReader": "senta_reader",
    **dict.fromkeys(
        ("Image2Array", "Normalization", "Sampler", "Scale", "TenCrop", "VideoDecoder"),
        "pptsn_reader",
    ),
}
"""Modules of the names that are not in ``image_reader``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'image_reader')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
