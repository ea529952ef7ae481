"""Which service a request is about, as the group with the doors sees it."""

from __future__ import annotations

import orjson
import pytest

from ovmstrio.cluster.ray.targets import HttpTarget, http_target, plain_path
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http import HttpRequest
from ovmstrio.core.peers import UNKNOWN_PEER

NAMES = {"m", "text", "graph"}
JSON = (("content-type", "application/json"),)


def _posted(target: str, document: object = None, headers: tuple[tuple[str, str], ...] = JSON) -> HttpRequest:
    return HttpRequest(
        "POST", "", "", headers, b"" if document is None else orjson.dumps(document), UNKNOWN_PEER, target
    )


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/v2/models/m/infer", "m"),
        ("/v1/models/m:predict", "m"),
        ("/v1/models/m/versions/1:predict?x=1", "m"),
        ("/v2/models/%6D", "m"),
        ("/graph/some/path", "graph"),
        ("/nothing", ""),
        ("/v2/models/", ""),
        ("/v2", ""),
    ],
)
def test_services_are_named_by_paths(target: str, name: str) -> None:
    """Those of all protocols, and of services with paths of their own."""
    assert http_target(_posted(target), NAMES).name == name


@pytest.mark.parametrize(
    "target", ["/v3/chat/completions", "/v1/completions", "/v2/rerank", "/v1/v2/rerank", "/v1/images/generations"]
)
def test_services_of_openais_paths_are_named_by_bodies(target: str) -> None:
    """Whichever group has them, and also where the path is not one of the usual three."""
    assert http_target(_posted(target, {"model": "text"}), NAMES) == HttpTarget("text", may_stream=True)


def test_a_graphs_own_path_names_it() -> None:
    """Its body may be anything then."""
    assert http_target(_posted("/v3/graph/x", headers=()), NAMES).name == "graph"


@pytest.mark.parametrize("document", [None, [], {}, {"model": 3}])
def test_a_body_without_a_model_is_for_any_to_refuse(document: object) -> None:
    """With the words and the status that a server alone has for it."""
    assert http_target(_posted("/v3/chat/completions", document), NAMES).name == ""


@pytest.mark.parametrize(
    "request_", [HttpRequest("GET", "", target="/v1/models/"), _posted("/v1/audio/transcriptions", headers=())]
)
def test_what_would_be_answered_in_part_is_refused_with_the_way_out(request_: HttpRequest) -> None:
    """Such as a list of the models of one group."""
    with pytest.raises(NotSupported, match='place all models of text in the group "ingress"'):
        http_target(request_, NAMES)


def test_a_slash_at_the_end_does_not_matter() -> None:
    """As it does not for a server alone."""
    assert plain_path(HttpRequest("GET", "", target="/v2/models/?x=/")) == "/v2/models"
    assert plain_path(HttpRequest("GET", "", target="/")) == "/"
