"""Instructor's modes that make a model fill in a class, whole and in parts."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import instructor
import openai
from arguments import REST
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Berlin"]
    size: int = Field(ge=0, le=99)


ASKED = {"model": "chat", "messages": [{"role": "user", "content": "Describe Paris."}], "max_tokens": 120}
OPENAI = openai.OpenAI(base_url=f"http://{REST}/v3", api_key="none", max_retries=0)

for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    client = instructor.from_openai(OPENAI, mode=instructor.Mode[mode])
    assert isinstance(client.chat.completions.create(**ASKED, response_model=City, max_retries=0), City)
    *_, last = client.chat.completions.create_partial(**ASKED, response_model=City)
    assert City.model_validate(last.model_dump())
responses = instructor.from_openai(OPENAI, mode=instructor.Mode.RESPONSES_TOOLS)
assert isinstance(responses.chat.completions.create(**ASKED, response_model=City, max_retries=0), City)
# These modes impose no form, so the model may write something else than a city.
for mode in ("JSON", "MD_JSON"):
    client = instructor.from_openai(OPENAI, mode=instructor.Mode[mode])
    with suppress(InstructorRetryException, IncompleteOutputException):
        client.chat.completions.create(**ASKED, response_model=City, max_retries=0)
