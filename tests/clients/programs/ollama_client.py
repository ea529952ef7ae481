"""Ollama's client: chats, texts, tools, schemas, embeddings, lists of models, errors."""

from __future__ import annotations

import json
from typing import Any

import ollama
from arguments import REST

GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12, "num_ctx": 2048}
ASKED: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Describe Paris."}],
    "options": GREEDY,
}
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Berlin"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: name of the city
    """
    return f"sunny in {city}"


def check_texts(client: ollama.Client) -> None:
    whole = client.chat(**ASKED)
    assert (whole.done_reason, whole.eval_count) == ("length", 12)
    assert whole.total_duration >= whole.prompt_eval_duration > 0
    lines = list(client.chat(**ASKED, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].prompt_eval_count == whole.prompt_eval_count
    stop = whole.message.content[3:5]
    stopped = client.chat(**{**ASKED, "options": {**GREEDY, "stop": [stop]}})
    assert stopped.message.content == whole.message.content.partition(stop)[0]
    assert stopped.done_reason == "stop"

    made = client.generate("chat", "Describe Paris.", options=GREEDY)
    assert made.response == whole.message.content
    assert "".join(
        line.response for line in client.generate("chat", "Describe Paris.", options=GREEDY, stream=True)
    ) == (made.response)
    raw = client.generate("chat", "Describe Paris.", raw=True, options=GREEDY)
    assert raw.prompt_eval_count < made.prompt_eval_count
    assert client.generate("chat", "a", system="Be brief.", think=False, keep_alive="5m", options=GREEDY).response
    assert client.generate("chat").done_reason == "load"
    assert client.generate("chat", keep_alive=0).done_reason == "unload"


def check_tools_and_forms(client: ollama.Client) -> None:
    long = {"num_predict": 150}
    city = json.loads(client.chat(**{**ASKED, "options": long}, format=CITY).message.content)
    assert city["name"] in {"Paris", "Berlin"}
    assert json.loads(client.generate("chat", "a city", format=CITY, options=long).response)["size"] < 100
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "content": weather("Paris"), "tool_name": "weather"},
    ]
    answer = client.chat("chat", messages, tools=[weather], options=GREEDY)
    assert answer.message.content or answer.message.tool_calls


def check_models(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert {"chat", "words"} <= set(names), names
    assert {model.model for model in client.ps().models} == set(names)
    shown = client.show("chat:latest")
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.template
    embedded = client.embed("words", ["a cat", "a dog"])
    assert len(embedded.embeddings) == 2
    assert embedded.prompt_eval_count > 0
    assert list(client.embeddings("words", "a cat").embedding) == list(embedded.embeddings[0])


def status(call: Any) -> int:
    try:
        call()
    except ollama.ResponseError as error:
        return error.status_code
    raise AssertionError("no error")


def check_errors(client: ollama.Client) -> None:
    assert status(lambda: client.chat(**{**ASKED, "model": "nothing"})) == 404
    assert status(lambda: list(client.chat(**{**ASKED, "model": "nothing"}, stream=True))) == 404
    assert status(lambda: client.chat(**{**ASKED, "options": {"temperature": 3}})) == 400
    assert status(lambda: client.chat(**{**ASKED, "options": {"mirostat": 2}})) == 400
    assert status(lambda: client.generate("chat", "a " * 9_000)) == 400
    assert status(lambda: client.embed("chat", "a")) == 400
    for _ in client.chat(**{**ASKED, "options": {"num_predict": 1500}}, stream=True):
        break


with ollama.Client(host=f"http://{REST}") as connected:
    check_texts(connected)
    check_tools_and_forms(connected)
    check_models(connected)
    check_errors(connected)
