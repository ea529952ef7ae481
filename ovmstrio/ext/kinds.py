"""What a kind of service of one's own is written with; ``ovmstrio.serve`` takes it beside those of the server."""

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Schema, check_members, is_whole
from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located, Place
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.datatypes import BY_NAME, Datatype
from ovmstrio.core.errors import Problem
from ovmstrio.core.http import ByteStream, HttpAnswer, HttpRequest
from ovmstrio.core.request import (
    Contents,
    InferInput,
    InferRequest,
    InferResponse,
    RequestedOutput,
    ServableMetadata,
    StreamProblem,
)
from ovmstrio.core.servable import HttpRoutes, InferStream, LeasedServable, Servable, Service, StreamingServable
from ovmstrio.core.tensor import ANY_SIZE, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.repository.fingerprints import content_mark, tree_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Dependency, Kind, LoadContext, Takes
from ovmstrio.runtimes.models.validation import Validator

__all__ = [
    "ANY_SIZE",
    "BY_NAME",
    "ONLY_VERSION",
    "ByteStream",
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
    "Takes",
    "Tensor",
    "TensorSpec",
    "Validator",
    "check_members",
    "content_mark",
    "is_whole",
    "tree_mark",
]
