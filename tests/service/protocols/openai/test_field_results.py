"""The results of fields that docs/openai_fields.md lists, for each endpoint, and that the list is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from openai.types import EmbeddingCreateParams, ImageCreateVariationParams, completion_create_params
from openai.types.audio import SpeechCreateParams, TranslationCreateParams
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.image_edit_params import ImageEditParamsStreaming
from openai.types.image_generate_params import ImageGenerateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from ovmstrio.cli.field_reference import reference
from ovmstrio.protocols.openai.known_fields import ENDPOINT_FIELDS
from tests.service.protocols.openai.servers import BRUSH, CHAT, EARS, VOICE, WORDS, service_of
from tests.unit.protocols.servers import Serving

_PAGE: Final = Path(__file__).parents[4] / "docs" / "openai_fields.md"
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/chat/completions": {"model": CHAT, "messages": [{"role": "user", "content": "a"}]},
    "/completions": {"model": CHAT, "prompt": "a"},
    "/responses": {"model": CHAT, "input": "a"},
    "/embeddings": {"model": WORDS, "input": "a"},
    "/rerank": {"model": WORDS, "query": "a", "documents": ["a"]},
    "/score": {"model": WORDS, "text_1": "a", "text_2": "a"},
    "/pooling": {"model": WORDS, "input": "a"},
    "/tokenize": {"model": WORDS, "text": "a"},
    "/detokenize": {"model": WORDS, "tokens": [1]},
    "/audio/transcriptions": {"model": EARS},
    "/audio/speech": {"model": VOICE, "input": "a"},
    "/images/generations": {"model": BRUSH, "prompt": "a"},
}
_VALUES: Final[tuple[Any, ...]] = ([[5.5]], 5.5, {"x": 5.5}, "x", "auto", 1, True, {})
"""Values of all types; of a field that the server reads or checks, at least one is invalid."""


_OPENAI: Final[dict[str, tuple[Any, ...]]] = {
    "/chat/completions": (CompletionCreateParamsStreaming,),
    "/completions": (completion_create_params.CompletionCreateParamsStreaming,),
    "/responses": (ResponseCreateParamsStreaming,),
    "/embeddings": (EmbeddingCreateParams,),
    "/audio/transcriptions": (TranscriptionCreateParamsStreaming, TranslationCreateParams),
    "/audio/speech": (SpeechCreateParams,),
    "/images/generations": (ImageGenerateParamsStreaming,),
    "/images/edits": (ImageEditParamsStreaming,),
    "/images/variations": (ImageCreateVariationParams,),
}
"""Types of OpenAI's client that have the fields of an endpoint."""
_VLLM_TEXT: Final = """
    allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs min_p min_tokens model n presence_penalty
    priority prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side
    use_beam_search user vllm_xargs watermarking add_special_tokens echo
    best_of guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
    logits_processors structural_tag
"""
_VLLM_ENCODERS: Final = """
    cache_salt mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
    use_activation user
"""
_VLLM: Final = {
    "/chat/completions": f"""
        {_VLLM_TEXT} add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        include_reasoning max_completion_tokens max_tokens media_io_kwargs messages mm_processor_kwargs
        parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
    """,
    "/completions": f"{_VLLM_TEXT} max_tokens prompt prompt_embeds suffix",
    "/responses": """
        background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output input instructions
        logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs model parallel_tool_calls
        previous_input_messages previous_response_id priority prompt prompt_cache_key reasoning repetition_penalty
        request_id seed service_tier skip_special_tokens stop store stream structured_outputs temperature text
        tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs
    """,
    "/embeddings": f"""
        {_VLLM_ENCODERS} add_special_tokens dimensions embed_dtype encoding_format endianness input normalize messages
        add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs
    """,
    "/pooling": f"""
        {_VLLM_ENCODERS} add_special_tokens dimensions embed_dtype encoding_format endianness input messages task
        add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs
    """,
    "/rerank": f"{_VLLM_ENCODERS} documents query top_n",
    "/score": f"{_VLLM_ENCODERS} data_1 data_2 documents queries text_1 text_2",
    "/tokenize": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """,
    "/detokenize": "model tokens",
    "/audio/transcriptions": """
        file frequency_penalty hotwords include_stop_str_in_output language length_penalty max_completion_tokens min_p
        model n presence_penalty prompt repetition_penalty response_format seed stream stream_continuous_usage_stats
        stream_include_usage temperature timestamp_granularities to_language top_k top_p use_beam_search vllm_xargs
    """,
}
"""Fields of vLLM's request classes, those of earlier versions included."""


class _Row(NamedTuple):
    path: str
    result: str
    field: str
    accepted: Any = None


def _rows() -> Iterator[_Row]:
    for path, known in ENDPOINT_FIELDS.items():
        yield from (_Row(path, "works", name) for name in known.used)
        yield from (_Row(path, "no effect", name) for name in known.ignored)
        for name, refused in known.refused.items():
            for neutral in refused.neutral if isinstance(refused.neutral, tuple) else (refused.neutral,):
                yield _Row(path, "refused", name, False if neutral is None else neutral)


ROWS: Final = list(_rows())


def test_the_page_is_up_to_date() -> None:
    assert _PAGE.read_text(encoding="utf-8") == reference(), "run `just docs`"


@pytest.mark.parametrize("path", _OPENAI)
def test_each_field_of_the_client_of_openai_has_a_result(path: str) -> None:
    fields = {name for each in _OPENAI[path] for name in (*each.__required_keys__, *each.__optional_keys__)}
    assert fields - {row.field for row in ROWS if row.path == path} == set()


@pytest.mark.parametrize("path", _VLLM)
def test_each_field_of_vllm_has_a_result(path: str) -> None:
    assert set(_VLLM[path].split()) - {row.field for row in ROWS if row.path == path} == set()


async def _post(serving: Serving, path: str, **fields: Any) -> Any:
    body = _BODIES[path] | fields
    if path != "/audio/transcriptions":
        return await serving.post(f"/v3{path}", json=body)
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    files = {"file": ("a.wav", b"sound", "audio/wav")}
    return await serving.post(f"/v3{path}", data=form, files=files)


def _refused(answer: Any) -> tuple[str, str]:
    if answer.status_code == 200:
        return "", ""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"] or ""


@pytest.mark.parametrize("path", _BODIES)
async def test_each_listed_field_has_its_result(serving: Serving, path: str) -> None:
    found: dict[str, str] = {}
    untyped = {"language", "prompt"} if path == "/audio/transcriptions" else set()  # any text is valid
    for row in (each for each in ROWS if each.path == path and each.field not in {"file", "model", "stream"} | untyped):
        answers = [await _post(serving, path, **{row.field: value}) for value in _VALUES]
        refused = [_refused(answer) for answer in answers]
        unsupported = (row.field, "unsupported_parameter")
        if row.result == "refused":
            answer = await _post(serving, path, **{row.field: row.accepted})
            has_result = unsupported in refused and answer.status_code == 200
        elif row.result == "no effect":
            has_result = ("", "") in refused and all(param in {"", row.field} for param, _ in refused)
        else:
            has_result = any(param.startswith(row.field) for param, _ in refused)
        if not has_result or (row.field, "unknown_parameter") in refused:
            found[row.field] = f"listed as {row.result}: {refused}"
    assert found == {}


@pytest.mark.parametrize("path", _BODIES)
async def test_a_field_that_is_not_listed_is_refused(serving: Serving, path: str) -> None:
    listed = {row.field for row in ROWS if row.path == path}
    others = {row.field for row in ROWS} - listed - {"file"}
    answered = {name for name in others if _refused(await _post(serving, path, **{name: "x"}))[0] != name}
    assert answered == set()
    answer = await _post(serving, path, mirostat="2")
    assert _refused(answer) == ("mirostat", "unknown_parameter")
    assert (await _post(serving, path, **dict.fromkeys(("mirostat",), None))).status_code == (
        400 if path == "/audio/transcriptions" else 200
    )


async def test_several_unknown_fields_are_reported_in_one_message(serving: Serving) -> None:
    answer = await _post(serving, "/chat/completions", max_token=5, temperatur=1, top_p="x")
    message = answer.json()["error"]["message"]
    assert "'max_token'; did you mean 'max_tokens'?" in message
    assert "'temperatur'; did you mean 'temperature'?" in message
    assert "top_p is not a valid number" in message
    assert not service_of(serving).requests


async def test_the_form_of_ovms_ignores_unknown_fields(ovms_serving: Serving) -> None:
    for path in _BODIES:
        assert (await _post(ovms_serving, path, mirostat="2")).status_code == 200, path
    refused = await _post(ovms_serving, "/chat/completions", logit_bias={"1": 5})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [("function_call", {"name": "f", "arguments": "{}"}), ("prefix", True), ("partial", True), ("audio", {"id": "a"})],
)
async def test_fields_of_messages_that_would_change_the_prompt_are_refused(
    serving: Serving, field: str, value: Any
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: value}]
    answer = await _post(serving, "/chat/completions", messages=messages)
    assert _refused(answer) == (f"messages[1].{field}", "unsupported_parameter")
