"""``/embeddings``, ``/rerank`` and ``/tokenize``: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.errors import ContextExceeded, Overloaded
from ovmstrio.core.generation import Padding
from tests.support.text_encoders import WORDS, LetterEncoder, load_encoder
from tests.support.text_generators import CHAT, text_spec
from tests.unit.api.rest.servers import Serving, serving_rest

PREFIXES = ["/v3", "/v1", "/v3/v1"]


@pytest.fixture
async def encoders(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``words``, which makes vectors and scores, and ``chat``, which makes text."""
    models: Any = (text_spec(tmp_path / "words", WORDS), text_spec(tmp_path / "chat"))
    async with serving_rest(tmp_path, models=models, loader=load_encoder) as server:
        yield server


def service_of(serving: Serving) -> LetterEncoder:
    """Give what is served as ``words``."""
    service: Any = serving.registry.peek(WORDS)
    assert isinstance(service, LetterEncoder)
    return service


async def error_of(serving: Serving, path: str, status: int = 400, **body: Any) -> Any:
    """Give the error that a body is refused with."""
    answer = await serving.post(path, json={"model": WORDS, **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_text_has_one_vector(encoders: Serving, prefix: str) -> None:
    """In OpenAI's form, with how many tokens there were."""
    answer = await encoders.post(f"{prefix}/embeddings", json={"model": WORDS, "input": "banana"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "embedding": [6.0, 3.0, 0.0, 0.0], "index": 0}],
        "model": WORDS,
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["a", "bb"], ["a", "bb"]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        (["a", [98]], ["a", (98,)]),
        ("", [""]),
    ],
)
async def test_texts_and_tokens_come_alone_and_in_lists(encoders: Serving, given: Any, asked: Any) -> None:
    """Numbers are the tokens of one text."""
    answer = await encoders.post("/v3/embeddings", json={"model": WORDS, "input": given})

    assert answer.status_code == 200
    assert service_of(encoders).asked == [asked]
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(asked)))


async def test_vectors_come_as_base64_of_their_bytes(encoders: Serving) -> None:
    """As OpenAI's own client asks for them."""
    body = {"model": WORDS, "input": ["banana", "b"], "encoding_format": "base64"}
    data = (await encoders.post("/v3/embeddings", json=body)).json()["data"]

    read = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in data]
    assert read == [[6, 3, 0, 0], [1, 0, 0, 0]]


async def test_many_large_vectors_are_written_as_few_small_ones(encoders: Serving) -> None:
    """Beyond what is written on the event loop."""
    service_of(encoders).width = 20_000
    texts = ["a" * number for number in range(20)]
    answer = await encoders.post("/v3/embeddings", json={"model": WORDS, "input": texts})

    vectors = [each["embedding"] for each in answer.json()["data"]]
    assert [(len(vector), vector[:2]) for vector in vectors] == [(20_000, [number, number]) for number in range(20)]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "input", "input field is required"),
        ({"input": 5}, "input", "input should be string, array of strings or array of integers; got 5"),
        ({"input": []}, "input", "input should have 1 to 500 texts; got 0"),
        ({"input": ["a"] * 501}, "input", "input should have 1 to 500 texts; got 501"),
        ({"input": ["a", 5.5]}, "input[1]", "input[1] is neither a text nor an array of tokens; got 5.5"),
        ({"input": [1, -1]}, "input", "input should have the numbers of tokens alone; got -1"),
        ({"input": [1, True]}, "input", "input should have the numbers of tokens alone; got True"),
        ({"input": [[1, 2**31]]}, "input[0]", "input[0] should have the numbers of tokens alone; got 2147483648"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format should either base64 or float"),
        ({"input": "a", "encoding_format": []}, "encoding_format", "encoding_format should either base64 or float"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions value should be at least 1; got 0"),
        (
            {"input": "a", "dimensions": 2},
            "dimensions",
            "this model gives vectors of 4 numbers, and none that could be",
        ),
    ],
)
async def test_inputs_that_are_none_are_refused(encoders: Serving, body: Any, field: str, message: str) -> None:
    """By the field that is wrong."""
    error = await error_of(encoders, "/v3/embeddings", **body)

    assert error["param"] == field
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"


async def test_the_dimensions_that_a_model_has_may_be_asked_for(encoders: Serving) -> None:
    """They change nothing."""
    body = {"model": WORDS, "input": "a", "dimensions": 4}
    assert (await encoders.post("/v3/embeddings", json=body)).status_code == 200


async def test_what_the_service_refuses_is_told_with_its_status(encoders: Serving) -> None:
    """Too long a text is the caller's mistake, a full queue is worth another try."""
    service_of(encoders).refusal = ContextExceeded("Input length 600 longer than allowed 512", field="input[1]")
    error = await error_of(encoders, "/v3/embeddings", input=["a", "b"])
    assert error == {
        "message": "Input length 600 longer than allowed 512",
        "type": "invalid_request_error",
        "param": "input[1]",
        "code": "context_length_exceeded",
    }
    service_of(encoders).refusal = Overloaded("try again later")
    answer = await encoders.post("/v3/embeddings", json={"model": WORDS, "input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("path", ["/v3/embeddings", "/v3/rerank"])
async def test_what_makes_text_gives_no_vectors(encoders: Serving, path: str) -> None:
    """What it does is said."""
    body = {"model": CHAT, "input": "a", "query": "a", "documents": ["a"]}
    answer = await encoders.post(path, json=body)

    assert answer.status_code == 400
    assert "it does text_generation" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [*(f"{prefix}/rerank" for prefix in PREFIXES), "/v2/rerank", "/v3/v2/rerank"])
async def test_documents_are_ranked_best_first(encoders: Serving, path: str) -> None:
    """In Cohere's form, wherever its clients look for it."""
    body = {"model": WORDS, "query": "abcd", "documents": ["a", "abcd", "xyz", "ab", "b"]}
    document = (await encoders.post(path, json=body)).json()

    assert [each["index"] for each in document["results"]] == [1, 3, 0, 4, 2]
    assert [each["relevance_score"] for each in document["results"]] == [1, 0.5, 0.25, 0.25, 0]
    assert "document" not in document["results"][0]
    assert isinstance(document["id"], str)
    assert document["meta"]["tokens"] == {"input_tokens": 5 * 4 + 11}
    assert document["usage"]["total_tokens"] == 5 * 4 + 11


async def test_the_best_documents_come_with_their_texts_where_that_is_wished_for(encoders: Serving) -> None:
    """Documents may be objects, as they were in earlier forms."""
    body = {"query": "ab", "documents": ["x", {"text": "ab"}, "a"], "top_n": 2, "return_documents": True}
    document = (await encoders.post("/v3/rerank", json={"model": WORDS, **body})).json()

    assert document["results"] == [
        {"index": 1, "relevance_score": 1, "document": {"text": "ab"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "a"}},
    ]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"documents": ["a"]}, "query", "query is missing in request"),
        ({"query": 5, "documents": ["a"]}, "query", "query is not a string; got 5"),
        ({"query": "a"}, "documents", "documents is missing in request"),
        ({"query": "a", "documents": "a"}, "documents", "documents is not an array of strings; got 'a'"),
        ({"query": "a", "documents": []}, "documents", "documents should be 1 to 500; got 0"),
        ({"query": "a", "documents": ["a", {"title": "a"}]}, "documents[1]", "documents[1] is neither a string nor"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "top_n value should be at least 1; got 0"),
        ({"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents", "return_documents accepts"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields", "rank_fields is not supported"),
    ],
)
async def test_what_cannot_be_ranked_is_refused(encoders: Serving, body: Any, field: str, message: str) -> None:
    """By the field that is wrong."""
    error = await error_of(encoders, "/v3/rerank", **body)

    assert error["param"] == field
    assert error["message"].startswith(message)


async def test_tokens_of_a_text_and_of_several(encoders: Serving) -> None:
    """A list for a text, and a list of lists for a list."""
    one = await encoders.post("/v3/tokenize", json={"model": WORDS, "text": "ab"})
    several = await encoders.post("/v1/tokenize", json={"model": WORDS, "text": ["ab", "c"]})

    assert one.json() == {"tokens": [97, 98]}
    assert several.json() == {"tokens": [[97, 98], [99]]}
    assert service_of(encoders).asked[0] == (["ab"], True, None, None)


async def test_many_tokens_are_written_as_few(encoders: Serving) -> None:
    """Beyond what is written on the event loop."""
    answer = await encoders.post("/v3/tokenize", json={"model": WORDS, "text": ["a" * 60_000, ""]})

    assert answer.json() == {"tokens": [[97] * 60_000, []]}


async def test_options_of_tokens_reach_the_tokenizer(encoders: Serving) -> None:
    """Those that OVMS has."""
    options = {"add_special_tokens": False, "max_length": 7, "pad_to_max_length": True, "padding_side": "left"}
    await encoders.post("/v3/tokenize", json={"model": WORDS, "text": "a", **options})
    await encoders.post("/v3/tokenize", json={"model": WORDS, "text": "a", "pad_to_max_length": True})

    assert service_of(encoders).asked == [(["a"], False, 7, Padding.LEFT), (["a"], True, None, Padding.RIGHT)]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "text", "text field is required"),
        ({"text": ["a", 1]}, "text", "text should be string or array of strings; got a list"),
        ({"text": "a", "max_length": 0}, "max_length", "max_length value should be at least 1; got 0"),
        ({"text": "a", "padding_side": ["left"]}, "padding_side", "padding_side is not a string; got a list"),
        ({"text": "a", "padding_side": "up"}, "padding_side", "padding_side should be either left or right; got 'up'"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(encoders: Serving, body: Any, field: str, message: str) -> None:
    """By the field that is wrong."""
    error = await error_of(encoders, "/v3/tokenize", **body)

    assert (error["param"], error["message"]) == (field, message)


async def test_a_service_without_a_tokenizer_has_no_tokens(encoders: Serving) -> None:
    """As a model of tensors has none."""
    answer = await encoders.post("/v3/tokenize", json={"model": CHAT, "text": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == 'the service "chat" has no tokenizer that could be asked'
    answer = await encoders.post("/v3/tokenize", json={"model": "echo", "text": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


async def test_a_name_that_nothing_has_is_refused(encoders: Serving) -> None:
    """In OpenAI's word for it."""
    answer = await encoders.post("/v3/embeddings", json={"model": "nothing", "input": "a"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
