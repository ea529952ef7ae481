"""Service kind API, for kinds passed to ``ovmstrio.serve``."""

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Findings, Located, Place
from ovmstrio.config.schema import Schema, check_members, is_whole
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import Problem
from ovmstrio.core.http_messages import ByteStream, HttpAnswer, HttpRequest
from ovmstrio.core.request import (
    Contents,
    InferInput,
    InferRequest,
    InferResponse,
    RequestedOutput,
    ServableMetadata,
    StreamProblem,
)
from ovmstrio.core.service import HttpRoutes, InferStream, LeasedServable, Servable, Service, StreamingServable
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, Datatype, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.models.validation import Validator
from ovmstrio.serving.fingerprints import content_fingerprint, tree_fingerprint
from ovmstrio.serving.kind import CallType, Dependency, Kind, LoadContext
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.deprecation import forward_names

__all__ = [
    "ANY_SIZE",
    "BY_NAME",
    "ONLY_VERSION",
    "ByteStream",
    "CallType",
    "ConfigFile",
    "Contents",
    "Datatype",
    "Dependency",
    "Dim",
    "Findings",
    "HttpAnswer",
    "HttpRequest",
    "HttpRoutes",
    "InferInput",
    "InferRequest",
    "InferResponse",
    "InferStream",
    "Kind",
    "LeasedServable",
    "Listing",
    "LoadContext",
    "Located",
    "Place",
    "Problem",
    "RawTensor",
    "RequestedOutput",
    "Schema",
    "Servable",
    "ServableMetadata",
    "ServableSpec",
    "Service",
    "StreamProblem",
    "StreamingServable",
    "Tensor",
    "TensorSpec",
    "Validator",
    "check_members",
    "content_fingerprint",
    "is_whole",
    "tree_fingerprint",
]

__getattr__ = forward_names(
    __name__,
    __name__,
    {"Takes": "CallType", "content_mark": "content_fingerprint", "tree_mark": "tree_fingerprint"},
)
