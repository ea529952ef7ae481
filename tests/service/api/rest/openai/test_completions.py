"""Completions over OpenAI's API: prompts of all forms, and their texts, whole and as events."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.generation import Finish, Piece, TokenLogprob
from tests.service.api.rest.openai.talking import events_of, generator_of
from tests.support.text_generators import CHAT
from tests.unit.api.rest.servers import Serving

PATH = "/v3/completions"
NODE_FAILED = (
    "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
    'Calculator::Process() for node "LLMExecutor" failed: '
)


def _body(prompt: Any = "one two", **more: Any) -> dict[str, Any]:
    return {"model": CHAT, "prompt": prompt, **more}


async def test_a_prompt_is_gone_on_with(serving: Serving) -> None:
    """One document tells it."""
    answer = await serving.post(PATH, json=_body())

    document = answer.json()
    assert answer.status_code == 200
    assert document.pop("id").startswith("cmpl-")
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "text_completion",
        "model": CHAT,
        "choices": [{"index": 0, "text": "one two", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a b", ["a b"]),
        (["a", "b c"], ["a", "b c"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [7]], ["a", (7,)]),
    ],
)
async def test_texts_and_tokens_come_alone_and_in_lists(serving: Serving, prompt: Any, prompts: list[Any]) -> None:
    """Each is a request of its own."""
    answer = await serving.post(PATH, json=_body(prompt, n=2))

    asked = generator_of(serving).requests
    assert sorted((each.prompt for each in asked), key=str) == sorted(prompts, key=str)
    said = [each if isinstance(each, str) else " ".join(map(str, each)) for each in prompts]
    choices = answer.json()["choices"]
    assert [(each["index"], each["text"]) for each in choices] == list(enumerate(text for text in said for _ in "12"))


async def test_texts_of_several_prompts_are_streamed_by_their_indices(serving: Serving) -> None:
    """In any order among each other."""
    answer = await serving.post(PATH, json=_body(["a b", "c"], stream=True, stream_options={"include_usage": True}))

    *chunks, usage, end = events_of(answer.text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "a b", 1: "c"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"], end) == (3, 3, "[DONE]")


async def test_a_prompt_may_be_echoed_with_the_probabilities_of_its_tokens(serving: Serving) -> None:
    """Without a token of an answer, as those ask who judge texts; the first token has none."""
    generator_of(serving).script = lambda _: [
        Piece(
            text="in it",
            logprobs=(TokenLogprob("in", None), TokenLogprob(" it", -1.5)),
            finish=Finish.LENGTH,
        )
    ]
    answer = await serving.post(PATH, json=_body("in it", echo=True, logprobs=1, max_tokens=0))

    asked = generator_of(serving).requests[-1]
    assert (asked.echo, asked.logprobs, asked.sampling.max_tokens) == (True, True, 0)
    assert answer.json()["choices"] == [
        {
            "index": 0,
            "text": "in it",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["in", " it"],
                "token_logprobs": [None, -1.5],
                "top_logprobs": [None, {" it": -1.5}],
                "text_offset": [0, 2],
            },
        }
    ]


async def test_offsets_of_tokens_go_on_from_event_to_event(serving: Serving) -> None:
    """As if they had come at once."""
    generator_of(serving).script = lambda _: [
        Piece(text="abc", logprobs=(TokenLogprob("abc", -1.0),)),
        Piece(text="d", logprobs=(TokenLogprob("d", -2.0),), finish=Finish.STOP),
    ]
    answer = await serving.post(PATH, json=_body(stream=True, logprobs=1))

    logprobs = [each["choices"][0]["logprobs"] for each in events_of(answer.text)[:-1]]
    assert [each["text_offset"] for each in logprobs] == [[0], [3]]


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"prompt": None}, "prompt is missing", "prompt"),
        ({"prompt": ""}, "prompt is missing", "prompt"),
        ({"prompt": 7}, "prompt is not a string", "prompt"),
        ({"prompt": []}, "expected 1 to 1024 texts; got 0", "prompt"),
        ({"prompt": ["a"] * 1025}, "expected 1 to 1024 texts; got 1025", "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1] is neither a text nor a list of tokens; got an empty text", "prompt[1]"),
        ({"prompt": [1, "a"]}, "expected at least one number of a token, from 0 to 299", "prompt"),
        ({"prompt": [[300]]}, "expected at least one number of a token, from 0 to 299", "prompt[0]"),
        ({"prompt": [True]}, "expected at least one number of a token", "prompt"),
        ({"prompt": [1] * 1001}, "Number of prompt tokens: 1001 exceeds model max length: 1000", "prompt"),
        ({"logprobs": 2}, "accepted logprobs value is currently 1 only", "logprobs"),
        ({"logprobs": "1"}, "logprobs accepts integer values", "logprobs"),
        ({"max_tokens": 0}, "max_tokens value should be greater than 0", "max_tokens"),
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
        ({"stream": True, "best_of": 2}, "best_of cannot be used in streaming mode", "best_of"),
    ],
)
async def test_a_field_that_cannot_be_is_named(serving: Serving, more: Any, message: str, param: str) -> None:
    """Before anything is asked of the service."""
    answer = await serving.post(PATH, json={**_body(), **more})

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
    assert not generator_of(serving).requests


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"{", 412, "The file is not valid json - Cannot parse JSON body"),
        (b"[]", 412, "The file is not valid json - JSON body must be an object"),
        (b'{"prompt": ""}', 412, "The file is not valid json - model field is missing in JSON body"),
        (b'{"model": 1}', 412, "The file is not valid json - model field is not a string"),
        (b'{"model": "chat", "stream": 1}', 412, "The file is not valid json - stream field is not a boolean"),
        (b'{"model": "none"}', 404, "Mediapipe graph definition with requested name is not found"),
        (
            b'{"model": "chat", "prompt": "x", "temperature": 7}',
            400,
            NODE_FAILED + "temperature out of range(0.0, 2.0)",
        ),
    ],
)
async def test_errors_are_ovms_own_where_that_is_wished_for(
    ovms_serving: Serving, content: bytes, status: int, text: str
) -> None:
    """To the letter."""
    answer = await ovms_serving.post(PATH, content=content)

    assert (answer.status_code, answer.json()) == (status, {"error": text})
