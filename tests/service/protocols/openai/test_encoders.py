from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.errors import ContextExceeded, Overloaded
from ovmstrio.core.generation import Padding, Task
from tests.service.protocols.openai.servers import CHAT, PREFIXES, WORDS, service_of
from tests.unit.protocols.servers import Serving

EMBEDDINGS, RERANK, TOKENIZE = "/v3/embeddings", "/v3/rerank", "/v3/tokenize"


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_text_is_answered_with_one_vector(serving: Serving, prefix: str) -> None:
    answer = await serving.post(f"{prefix}/embeddings", json={"model": WORDS, "input": "banana"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "embedding": [6.0, 3.0, 0.0, 0.0], "index": 0}],
        "model": WORDS,
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        (["a", "bb"], ["a", "bb"]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        (["a", [98]], ["a", (98,)]),
        ("", [""]),
    ],
)
async def test_inputs_are_texts_or_tokens(serving: Serving, value: Any, inputs: Any) -> None:
    answer = await serving.post(EMBEDDINGS, json={"model": WORDS, "input": value})
    assert answer.status_code == 200
    assert service_of(serving, WORDS).requests == [inputs]
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(inputs)))


async def test_vectors_are_encoded_as_base64_on_request(serving: Serving) -> None:
    body = {"model": WORDS, "input": ["banana", "b"], "encoding_format": "base64", "dimensions": 4}
    data = (await serving.post(EMBEDDINGS, json=body)).json()["data"]
    read = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in data]
    assert read == [[6, 3, 0, 0], [1, 0, 0, 0]]


async def test_large_answers_of_vectors_are_written_in_a_thread(serving: Serving) -> None:
    service_of(serving, WORDS).width = 20_000
    texts = ["a" * number for number in range(20)]
    answer = await serving.post(EMBEDDINGS, json={"model": WORDS, "input": texts})
    vectors = [each["embedding"] for each in answer.json()["data"]]
    assert [(len(vector), vector[:2]) for vector in vectors] == [(20_000, [number, number]) for number in range(20)]


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after", "param", "code"),
    [
        (ContextExceeded("too long", field="input[1]"), 400, None, "input[1]", "context_length_exceeded"),
        (Overloaded("too long"), 429, "1", None, "rate_limit_exceeded"),
    ],
)
async def test_errors_of_the_service_have_their_status_and_code(
    serving: Serving, refusal: Exception, status: int, retry_after: str | None, param: str | None, code: str
) -> None:
    service_of(serving, WORDS).refusal = refusal
    answer = await serving.post(EMBEDDINGS, json={"model": WORDS, "input": ["a", "b"]})
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
    assert (error["message"], error["param"], error["code"]) == ("too long", param, code)


@pytest.mark.parametrize("path", [*(f"{prefix}/rerank" for prefix in PREFIXES), "/v2/rerank", "/v3/v2/rerank"])
async def test_documents_are_ranked_in_the_form_of_cohere(serving: Serving, path: str) -> None:
    body = {"model": WORDS, "query": "abcd", "documents": ["a", "abcd", "xyz", "ab", "b"]}
    document = (await serving.post(path, json=body)).json()
    assert [each["index"] for each in document["results"]] == [1, 3, 0, 4, 2]
    assert [each["relevance_score"] for each in document["results"]] == [1, 0.5, 0.25, 0.25, 0]
    assert "document" not in document["results"][0]
    assert isinstance(document["id"], str)
    assert document["meta"]["tokens"] == {"input_tokens": 5 * 4 + 11}
    assert document["usage"]["total_tokens"] == 5 * 4 + 11


async def test_the_best_documents_have_their_texts_on_request(serving: Serving) -> None:
    body = {"query": "ab", "documents": ["x", {"text": "ab"}, "a"], "top_n": 2, "return_documents": True}
    document = (await serving.post(RERANK, json={"model": WORDS, **body})).json()
    assert document["results"] == [
        {"index": 1, "relevance_score": 1, "document": {"text": "ab"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "a"}},
    ]


@pytest.mark.parametrize("top_n", [0, None, 9])
async def test_all_documents_are_ranked_if_no_smaller_number_is_requested(serving: Serving, top_n: int | None) -> None:
    body = {"model": WORDS, "query": "ab", "documents": ["x", "ab", "a"], "top_n": top_n}
    document = (await serving.post(RERANK, json=body)).json()
    assert [each["index"] for each in document["results"]] == [1, 2, 0]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("ab", [97, 98]), (["ab", "c"], [[97, 98], [99]]), (["a" * 60_000, ""], [[97] * 60_000, []])],
    ids=["text", "texts", "long text"],
)
async def test_texts_are_answered_with_their_tokens(serving: Serving, text: Any, tokens: Any) -> None:
    answer = await serving.post("/v1/tokenize", json={"model": WORDS, "text": text})
    assert answer.json() == {"tokens": tokens}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (["a"], True, None, None)),
        ({"pad_to_max_length": True}, (["a"], True, None, Padding.RIGHT)),
        (
            {"add_special_tokens": False, "max_length": 7, "pad_to_max_length": True, "padding_side": "left"},
            (["a"], False, 7, Padding.LEFT),
        ),
    ],
)
async def test_options_of_tokenize_reach_the_tokenizer(serving: Serving, options: Any, expected: Any) -> None:
    await serving.post(TOKENIZE, json={"model": WORDS, "text": "a", **options})
    assert service_of(serving, WORDS).requests == [expected]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/v3/tokenize"])
async def test_a_prompt_is_answered_in_the_form_of_vllm(serving: Serving, path: str) -> None:
    answer = await serving.post(path, json={"model": WORDS, "prompt": "ab", "add_special_tokens": False})
    assert answer.json() == {"count": 2, "max_model_len": None, "tokens": [97, 98], "token_strs": None}
    assert service_of(serving, WORDS).requests == [(["ab"], False, None, None)]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize", "/v3/detokenize"])
async def test_tokens_are_answered_with_their_text(serving: Serving, path: str) -> None:
    answer = await serving.post(path, json={"model": WORDS, "tokens": [97, 98]})
    assert answer.json() == {"prompt": "ab"}


async def test_texts_are_scored_in_pairs(serving: Serving) -> None:
    cases: list[tuple[Any, Any, list[float], int]] = [
        ("ab", ["a", "b", "cab"], [0.5, 0.5, 1], 1),
        ("ab", "a", [0.5], 1),
        (["ab", "xy", "ab"], ["a", "xyz", "ab"], [0.5, 1, 1], 2),
    ]
    for first, second, expected, calls in cases:
        for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
            service_of(serving, WORDS).requests.clear()
            body = {"model": WORDS, names[0]: first, names[1]: second}
            document = (await serving.post("/score", json=body)).json()
            scores = [(each["index"], each["object"], each["score"]) for each in document["data"]]
            assert scores == [(index, "score", score) for index, score in enumerate(expected)]
            assert (document["object"], document["model"]) == ("list", WORDS)
            assert document["usage"]["prompt_tokens"] > 0
            # The documents of equal queries are one call of the model.
            assert len(service_of(serving, WORDS).requests) == calls


async def test_the_score_of_an_embedding_model_is_the_cosine(serving: Serving) -> None:
    service_of(serving, WORDS).tasks = frozenset({Task.EMBEDDINGS})
    body = {"model": WORDS, "text_1": "a", "text_2": ["a", "bb", "ab"]}
    scores = [each["score"] for each in (await serving.post("/v1/score", json=body)).json()["data"]]
    # Embeddings are [length, number of a's]: [1, 1], [2, 0], [2, 1].
    assert scores == pytest.approx([1, 2**-0.5, 3 / 10**0.5])


async def test_pooling_answers_with_embeddings_in_the_form_of_vllm(serving: Serving) -> None:
    for path in ("/pooling", "/v1/pooling"):
        document = (await serving.post(path, json={"model": WORDS, "input": ["aba", "b"], "task": "embed"})).json()
        assert document["data"] == [
            {"object": "pooling", "data": [3, 2, 0, 0], "index": 0},
            {"object": "pooling", "data": [1, 0, 0, 0], "index": 1},
        ]
        assert document["id"].startswith("pool-")
        assert document["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (EMBEDDINGS, {"input": "aaaa"}, [2, 2, 0, 0]),
        ("/v1/pooling", {"input": "aaaa"}, [2, 2, 0, 0]),
        ("/v1/score", {"text_1": "a", "text_2": "ba"}, 0),
        (RERANK, {"query": "a", "documents": ["ba"]}, 0),
    ],
)
async def test_inputs_of_encoders_are_truncated_on_request(
    serving: Serving, path: str, body: dict[str, Any], expected: Any
) -> None:
    document = (await serving.post(path, json={"model": WORDS, "truncate_prompt_tokens": 2, **body})).json()
    (item,) = document.get("data") or document["results"]
    assert next(item[name] for name in ("embedding", "data", "score", "relevance_score") if name in item) == expected


async def test_a_request_of_vllm_may_leave_out_the_only_text_model(serving: Serving) -> None:
    # The server has two text models.
    refused = await serving.post("/tokenize", json={"prompt": "ab"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    service_of(serving).tasks = frozenset()
    assert (await serving.post("/tokenize", json={"prompt": "ab"})).json()["tokens"] == [97, 98]
    assert (await serving.post("/score", json={"text_1": "a", "text_2": "a"})).json()["data"][0]["score"] == 1


REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    EMBEDDINGS: [
        ({}, "input", "input field is required"),
        ({"input": 5}, "input", "input should be string, array of strings or array of integers; got 5"),
        ({"input": []}, "input", "input: expected 1 to 16384 items; got 0"),
        ({"input": ["a"] * 16385}, "input", "input: expected 1 to 16384 items; got 16385"),
        ({"input": ["a", 5.5]}, "input[1]", "input[1] is neither a string nor an array of token ids; got 5.5"),
        ({"input": [1, -1]}, "input", "input: expected token ids; got -1"),
        ({"input": [1, True]}, "input", "input: expected token ids; got True"),
        ({"input": [[1, 2**31]]}, "input[0]", "input[0]: expected token ids; got 2147483648"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format should either base64 or float"),
        ({"input": "a", "encoding_format": []}, "encoding_format", "encoding_format should either base64 or float"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions value should be at least 1; got 0"),
        (
            {"input": "a", "dimensions": 2},
            "dimensions",
            "this model supports only 4 dimensions",
        ),
    ],
    RERANK: [
        ({"documents": ["a"]}, "query", "query is missing in request"),
        ({"query": 5, "documents": ["a"]}, "query", "query is not a string; got 5"),
        ({"query": "a"}, "documents", "documents is missing in request"),
        ({"query": "a", "documents": "a"}, "documents", "documents is not an array of strings; got 'a'"),
        ({"query": "a", "documents": []}, "documents", "documents: expected at least 1; got 0"),
        ({"query": "a", "documents": ["a", {"title": "a"}]}, "documents[1]", "documents[1] is neither a string nor"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "top_n is not an unsigned integer; got -1"),
        ({"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents", "return_documents accepts"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields", "rank_fields is not supported"),
    ],
    "/v1/score": [
        ({"text_2": "a"}, "text_1", "text_1 is missing in request"),
        ({"text_1": "a"}, "text_2", "text_2 is missing in request"),
        ({"text_1": 5, "text_2": "a"}, "text_1", "text_1 should be a string or an array of strings; got 5"),
        ({"text_1": "a", "text_2": []}, "text_2", "text_2: expected 1 to 16384 texts; got 0"),
        ({"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "text_1: expected one text, or as many as text_2 has"),
        ({"text_1": "a", "queries": "a", "text_2": "a"}, "queries", "text_1 and queries exclude each other"),
        ({"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tok"),
    ],
    "/v1/pooling": [
        ({}, "input", "input field is required"),
        ({"input": "a", "task": "token_embed"}, "task", "task should be one of embed; got 'token_embed'"),
    ],
    "/v1/detokenize": [
        ({}, "tokens", "tokens field is required"),
        ({"tokens": [1, -1]}, "tokens", "tokens: expected token ids; got a list"),
    ],
    TOKENIZE: [
        ({}, "text", "text field is required"),
        ({"prompt": "a", "text": "a"}, "prompt", "text and prompt exclude each other"),
        ({"prompt": 5}, "prompt", "prompt is not a string; got 5"),
        ({"prompt": "a", "max_length": 5}, "max_length", "max_length is only possible with text"),
        ({"text": "a", "return_token_strs": True}, "return_token_strs", "return_token_strs is only possible with pr"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs", "return_token_strs is not supported"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "messages is not supported for models without"),
        ({"text": ["a", 1]}, "text", "text should be string or array of strings; got a list"),
        ({"text": "a", "max_length": 0}, "max_length", "max_length value should be at least 1; got 0"),
        ({"text": "a", "padding_side": ["left"]}, "padding_side", "padding_side is not a string; got a list"),
        ({"text": "a", "padding_side": "up"}, "padding_side", "padding_side should be either left or right; got 'up'"),
    ],
}


@pytest.mark.parametrize(
    ("path", "more", "param", "message"), [(path, *row) for path, rows in REFUSED.items() for row in rows]
)
async def test_a_bad_field_is_refused(serving: Serving, path: str, more: Any, param: str, message: str) -> None:
    answer = await serving.post(path, json={"model": WORDS, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "model", "status", "code", "message"),
    [
        (EMBEDDINGS, CHAT, 400, "unsupported", "it does text_generation"),
        (RERANK, CHAT, 400, "unsupported", "it does text_generation"),
        (TOKENIZE, CHAT, 400, "unsupported", 'the service "chat" has no tokenizer'),
        (TOKENIZE, "echo", 400, "unsupported", "echo"),
        ("/v1/score", CHAT, 400, "unsupported", "is no rerank and no embedding model"),
        ("/v1/detokenize", CHAT, 400, "unsupported", "has no detokenizer"),
        (EMBEDDINGS, "nothing", 404, "model_not_found", "The model `nothing` does not exist"),
    ],
)
async def test_other_tasks_are_refused(
    serving: Serving, path: str, model: str, status: int, code: str, message: str
) -> None:
    bodies: dict[str, Any] = {
        EMBEDDINGS: {"input": "a"},
        RERANK: {"query": "a", "documents": ["a"]},
        TOKENIZE: {"text": "a"},
        "/v1/score": {"text_1": "a", "text_2": "a"},
        "/v1/detokenize": {"tokens": [1]},
    }
    answer = await serving.post(path, json={"model": model, **bodies[path]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert message in answer.json()["error"]["message"]
