"""Fields that requests may have: read by the endpoint, without effect on the answer, or refused with a reason.

All other fields are refused, because a field that is ignored silently may have been meant to change the answer.
``docs/openai_fields.md`` is generated from :data:`ENDPOINT_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from ovmstrio.config.documents import did_you_mean
from ovmstrio.protocols.openai.fields import Fields, shown

_SHOWN_NAME_CHARACTERS: Final = 80
_Check: TypeAlias = Callable[[Fields, str], object]


class _Refused(NamedTuple):
    """Unsupported field with a hint.

    ``neutral`` is an accepted value, or several in a tuple; None accepts 0, false and empty values.
    """

    reason: str
    neutral: Any = None


Refused = _Refused


class KnownFields(NamedTuple):
    """Fields of an endpoint.

    ``ignored`` has the check of each value that has no effect on the answer; ``limits`` says which values of a used
    field are supported, if not all are.
    """

    used: frozenset[str]
    ignored: Mapping[str, _Check]
    refused: Mapping[str, _Refused]
    limits: Mapping[str, str] = {}

    def check(self, fields: Fields) -> None:
        """Record an error for each field that is unknown, unsupported or ignored with an invalid value."""
        for name in sorted(fields.names() - self.used):
            value = fields.get(name)
            if name in self.ignored:
                self.ignored[name](fields, name)
            elif name not in self.refused:
                if value is not None:
                    self._refuse_unknown(fields, name)
            elif value is not None and (value if self.refused[name].neutral is None else self._changes(name, value)):
                message = f"{name} is not supported: {self.refused[name].reason}"
                fields.refuse(name, message, got=shown(value), code="unsupported_parameter")

    def without_unknown(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body without unknown fields."""
        known = (self.used, self.ignored, self.refused)
        return {name: value for name, value in document.items() if any(name in names for names in known)}

    def _changes(self, name: str, value: Any) -> bool:
        neutral = self.refused[name].neutral
        values = neutral if isinstance(neutral, tuple) else (neutral,)
        return not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values)

    def _refuse_unknown(self, fields: Fields, name: str) -> None:
        hint = did_you_mean(name, self.used, otherwise="remove it")
        short = name[:_SHOWN_NAME_CHARACTERS]
        fields.refuse(short, f"Unknown parameter: {short!r}; {hint}", code="unknown_parameter")


def _integer(fields: Fields, name: str) -> int | None:
    return fields.integer(name, f"{name} is not an integer")


_IDENTITY: Final[Mapping[str, _Check]] = dict.fromkeys(("user", "request_id", "session_id"), Fields.text)
_IGNORED: Final[Mapping[str, _Check]] = {
    **_IDENTITY,
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"), Fields.text),
    **dict.fromkeys(("metadata", "prediction", "prompt_cache_options"), Fields.mapping),
    "spaces_between_special_tokens": Fields.flag,
    "guided_decoding_backend": Fields.text,
    "stream_interval": _integer,
}
IGNORED_REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("user", "request_id", "session_id", "safety_identifier"), "identifies the caller or the request"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "a hint for caches; the prefix cache finds equal prompts itself",
    ),
    "metadata": "notes of the caller",
    "service_tier": "the server has one tier",
    "prediction": "a hint for speed; prompt_lookup of the model does the same",
    "spaces_between_special_tokens": "the tokenizer decides",
    "guided_decoding_backend": "the server has one grammar compiler",
    "stream_interval": "each event has all text since the one before",
    "parallel_tool_calls": "completions have no tools",
    "stream_include_usage": "the last event has the usage",
    "client_metadata": "notes of the caller",
    "moderation": "auto or low: images are not moderated",
    "background": "auto or opaque: images are opaque",
}
"""Why fields have no effect on the answer."""

_NO_TOKEN_IDS: Final = _Refused("answers have no token ids; use /tokenize")
_NO_MEDIA: Final = _Refused("the settings in the folder of the model apply")
_ONE_ENGINE: Final = _Refused("a model has one engine")
_ONE_QUEUE: Final = _Refused("requests are served in order of arrival; omit it, or send 0")
_TOP_LOGPROBS: Final = "0 to 20, not with stream"
_NAME_OF_ADAPTER: Final = _Refused("an adapter is fixed when its model is loaded; set model to the adapter's name")
_REFUSED: Final[Mapping[str, _Refused]] = {
    **dict.fromkeys(("return_token_ids", "return_token_offsets"), _NO_TOKEN_IDS),
    "allowed_token_ids": _Refused("the generation library has no token filter; use response_format"),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), _NO_MEDIA),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "routed_experts_prompt_start"), _ONE_ENGINE),
    **dict.fromkeys(("adapter_id", "lora", "lora_adapters", "lora_path", "lora_request"), _NAME_OF_ADAPTER),
    "return_mm_kwargs": _Refused("answers have no inputs of the model", neutral=True),
    "guided_whitespace_pattern": _Refused("JSON has no optional white space; use response_format with a grammar"),
    "logit_bias": _Refused("the generation library has no logit bias"),
    "logits_processors": _Refused("the server runs no code of requests"),
    "logprob_token_ids": _Refused("answers have the most likely tokens, not chosen ones; use top_logprobs"),
    "moderation": _Refused("the server has no moderation"),
    "priority": _ONE_QUEUE,
    "no_repeat_ngram_size": _Refused("use repetition_penalty"),
    "repetition_detection": _Refused("use repetition_penalty, or max_tokens"),
    "return_prompt_text": _Refused("answers have no prompt"),
    "store": _Refused("only responses of /responses are stored; omit it or send false"),
    "thinking_token_budget": _Refused("reasoning has no separate limit; use max_tokens", neutral=-1),
    "vllm_xargs": _Refused("the server has no extensions of vLLM"),
    "watermarking": _Refused("the generation library has no watermarks"),
}

_SAMPLING: Final = frozenset(
    {
        *("model", "stream", "stream_options", "response_format", "n", "stop", "seed", "temperature", "top_p", "top_k"),
        *("min_p", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
        *("ignore_eos", "best_of", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
        *("num_assistant_tokens", "assistant_confidence_threshold", "max_ngram_size", "cache_salt"),
        *("add_special_tokens", "bad_words", "truncate_prompt_tokens", "truncation_side", "use_beam_search"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
    }
)
_TOOLS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"})
_LIMITS: Final = {
    "bad_words": "texts, not with response_format or imposed tool calls",
    "truncate_prompt_tokens": "prompts with more characters than can fit the context are refused all the same",
}
_NO_TEMPLATE: Final = _Refused("the server uses the model's template")

CHAT: Final = KnownFields(
    _SAMPLING
    | _TOOLS
    | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "modalities"}
    | {"reasoning_effort", "verbosity", "continue_final_message", "add_generation_prompt", "documents"}
    | {"echo", "include_reasoning", "return_tokens_as_token_ids", "prompt_logprobs"},
    _IGNORED,
    {
        **_REFUSED,
        "audio": _Refused("this model generates text only"),
        "chat_template": _NO_TEMPLATE,
        "function_call": _Refused("use tool_choice"),
        "functions": _Refused("use tools"),
        "web_search_options": _Refused("this server has no web search"),
    },
    {
        **_LIMITS,
        "top_logprobs": f"{_TOP_LOGPROBS}; with logprobs",
        "prompt_logprobs": _TOP_LOGPROBS,
        "modalities": "text",
    },
)
COMPLETIONS: Final = KnownFields(
    _SAMPLING | {"prompt", "max_tokens", "logprobs", "prompt_logprobs", "echo", "return_tokens_as_token_ids"},
    {**_IGNORED, "parallel_tool_calls": Fields.flag},
    {
        **_REFUSED,
        "prompt_embeds": _Refused("send a text or tokens"),
        "suffix": _Refused("the model only appends text"),
        "top_logprobs": _Refused("use logprobs"),
    },
    {**_LIMITS, "logprobs": "0 to 20; above 1 not with stream", "prompt_logprobs": _TOP_LOGPROBS},
)
RESPONSES: Final = KnownFields(
    _SAMPLING
    | _TOOLS
    | {"input", "instructions", "max_output_tokens", "text", "reasoning", "include", "truncation"}
    | {"max_tool_calls", "top_logprobs", "store", "background", "previous_response_id"},
    {**_IGNORED, "client_metadata": Fields.mapping},
    {
        **{name: refused for name, refused in _REFUSED.items() if name != "store"},
        "context_management": _Refused("the server shortens no conversation; send a shorter one"),
        "conversation": _Refused("the server has no conversations; use previous_response_id"),
        "prompt": _Refused("this server has no prompt templates; send input"),
        **dict.fromkeys(("previous_input_messages", "previous_response"), _Refused("send the conversation as input")),
        "prompt_logprobs": _Refused("use /chat/completions"),
        "return_tokens_as_token_ids": _NO_TOKEN_IDS,
        "enable_response_messages": _Refused("answers have no messages of the engine"),
        "access_programs": _Refused("this server has no access programs"),
        "background_options": _Refused("the background has no completion windows"),
        "image": _Refused("responses have no images"),
    },
    {
        **_LIMITS,
        "top_logprobs": f"{_TOP_LOGPROBS}; include has message.output_text.logprobs",
        "truncation": "auto never truncates: a conversation that is too long is refused",
        "max_tool_calls": "never reached: the server calls no tools",
    },
)

_TRUNCATE_OPTION: Final = _Refused("the option truncate of the model decides")
_ENCODERS: Final[Mapping[str, _Refused]] = {
    "truncation_side": _TRUNCATE_OPTION,
    "cache_salt": _Refused("there is no prefix cache; omit it"),
    "mm_processor_kwargs": _NO_MEDIA,
    "padding": _Refused("padding never changes the result", neutral="do_not_pad"),
    "priority": _ONE_QUEUE,
    "use_activation": _Refused("the options of the model decide"),
}
EMBEDDINGS: Final = KnownFields(
    frozenset({"model", "input", "encoding_format", "dimensions", "truncate_prompt_tokens", "prompt_name"}),
    _IDENTITY,
    {
        **_ENCODERS,
        "add_special_tokens": _Refused("send tokens instead of a text", neutral=True),
        "embed_dtype": _Refused("numbers have 32 bits", neutral="float32"),
        "endianness": _Refused("numbers are little-endian", neutral="little"),
        "input_type": _Refused("use prompt_name, or write the model's prefix into the texts"),
        **dict.fromkeys(
            ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
            _Refused("send texts as input"),
        ),
        "media_io_kwargs": _NO_MEDIA,
        "normalize": _Refused("the option normalize of the model decides"),
        "stream": _Refused("embeddings do not stream"),
        "task": _Refused("use prompt_name, or write the model's prefix into the texts"),
    },
    {"dimensions": "the model's own"},
)
RERANK: Final = KnownFields(
    frozenset({"model", "query", "documents", "top_n", "return_documents", "truncate_prompt_tokens"}),
    _IDENTITY,
    {
        **_ENCODERS,
        "instruction": _Refused("write it into the query"),
        "max_chunks_per_doc": _Refused("the option max_allowed_chunks of the model limits the chunks of all documents"),
        "max_tokens_per_doc": _Refused("documents are read completely"),
        "rank_fields": _Refused("documents have one text"),
        "stream": _Refused("scores do not stream"),
    },
)
SCORE: Final = KnownFields(
    frozenset(
        {
            *("model", "text_1", "text_2", "data_1", "data_2", "queries", "documents", "encoding_format"),
            "truncate_prompt_tokens",
        }
    ),
    _IDENTITY,
    {**_ENCODERS, "instruction": _Refused("write it into the texts"), "stream": _Refused("scores do not stream")},
)
POOLING: Final = KnownFields(
    EMBEDDINGS.used | {"task"},
    EMBEDDINGS.ignored,
    {name: refused for name, refused in EMBEDDINGS.refused.items() if name != "task"},
    {**EMBEDDINGS.limits, "task": "embed"},
)
TOKENIZE: Final = KnownFields(
    frozenset(
        {
            *("model", "text", "add_special_tokens", "max_length", "pad_to_max_length", "padding_side"),
            *("prompt", "messages", "return_token_strs", "add_generation_prompt", "continue_final_message"),
            *("chat_template_kwargs", "tools", "tool_choice"),
        }
    ),
    _IDENTITY,
    {"chat_template": _NO_TEMPLATE, "mm_processor_kwargs": _NO_MEDIA, "media_io_kwargs": _NO_MEDIA},
)
DETOKENIZE: Final = KnownFields(frozenset({"model", "tokens"}), _IDENTITY, {})

_NO_SAMPLING: Final = _Refused("the speech library has only a temperature")
TRANSCRIPTION: Final = KnownFields(
    frozenset(
        {
            *("model", "file", "language", "prompt", "response_format", "temperature", "stream"),
            *("timestamp_granularities", "include", "chunking_strategy"),
        }
    ),
    {"user": Fields.text, "stream_include_usage": Fields.flag},
    {
        **dict.fromkeys(
            (
                *("top_p", "top_k", "min_p", "seed", "frequency_penalty", "repetition_penalty", "presence_penalty"),
                *("use_beam_search", "n", "length_penalty", "penalty_decay", "max_completion_tokens"),
                "include_stop_str_in_output",
            ),
            _NO_SAMPLING,
        ),
        **dict.fromkeys(("hotwords", "keywords"), _Refused("write them into the prompt")),
        **dict.fromkeys(
            ("known_speaker_names", "known_speaker_references"), _Refused("the model does not tell speakers apart")
        ),
        "languages": _Refused("use language"),
        "stream_continuous_usage_stats": _Refused("the last event has the usage"),
        "to_language": _Refused("translations are English", neutral="en"),
        "vllm_xargs": _Refused("the server has no extensions of vLLM"),
    },
    {
        "chunking_strategy": "auto",
        "include": "empty: token probabilities are unknown",
    },
)
SPEECH: Final = KnownFields(
    frozenset({"model", "input", "voice", "language", "speed", "response_format", "stream_format"}),
    {"user": Fields.text},
    {
        "instructions": _Refused("the model has no instructions"),
        "stream": _Refused("use stream_format"),
    },
)


def _one_of(*values: str) -> _Check:
    return lambda fields, name: fields.choice(name, values)


_IMAGE_OPTIONS: Final = frozenset(
    {
        *("model", "n", "size", "response_format", "output_format", "output_compression"),
        *("num_images_per_prompt", "width", "height", "num_inference_steps", "guidance_scale", "strength"),
        *("seed", "rng_seed", "negative_prompt", "negative_prompt_2", "negative_prompt_3", "max_sequence_length"),
    }
)
_PROMPTS: Final = frozenset({"prompt", "prompt_2", "prompt_3"})
_LIMITS_OF_IMAGES: Final = {"response_format": "b64_json"}
_PARTIAL_IMAGES: Final = frozenset({"stream", "partial_images"})
_IGNORED_OF_IMAGES: Final[Mapping[str, _Check]] = {
    "user": Fields.text,
    "safety_identifier": Fields.text,
    "moderation": _one_of("auto", "low"),
    "background": _one_of("auto", "opaque"),
}
_REFUSED_OF_IMAGES: Final = {
    "lora_alphas": _Refused("image models have no LoRA adapters"),
    "quality": _Refused("use num_inference_steps", neutral=("auto", "standard")),
    "style": _Refused("describe the style in the prompt"),
    "complexity": _Refused("use num_inference_steps"),
    **dict.fromkeys(("frame_count", "frame_duration_ms"), _Refused("images have one frame")),
    "svg": _Refused("images have pixels"),
}
IMAGE_GENERATIONS: Final = KnownFields(
    _IMAGE_OPTIONS | _PROMPTS | _PARTIAL_IMAGES,
    _IGNORED_OF_IMAGES,
    {**_REFUSED_OF_IMAGES, **dict.fromkeys(("image", "mask"), _Refused("use /images/edits"))},
    {**_LIMITS_OF_IMAGES, "strength": "1"},
)
IMAGE_EDITS: Final = KnownFields(
    _IMAGE_OPTIONS | _PROMPTS | _PARTIAL_IMAGES | {"image", "mask"},
    _IGNORED_OF_IMAGES,
    {**_REFUSED_OF_IMAGES, "input_fidelity": _Refused("use strength"), "markup": _Refused("send a mask")},
    _LIMITS_OF_IMAGES,
)
IMAGE_VARIATIONS: Final = KnownFields(
    _IMAGE_OPTIONS | {"image"},
    _IGNORED_OF_IMAGES,
    {
        **_REFUSED_OF_IMAGES,
        **dict.fromkeys(("prompt", "mask"), _Refused("use /images/edits")),
        "stream": _Refused("variations do not stream; use /images/edits"),
    },
    _LIMITS_OF_IMAGES,
)

ENDPOINT_FIELDS: Final[Mapping[str, KnownFields]] = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/embeddings": EMBEDDINGS,
    "/pooling": POOLING,
    "/rerank": RERANK,
    "/score": SCORE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/audio/transcriptions": TRANSCRIPTION,
    "/audio/translations": TRANSCRIPTION,
    "/audio/speech": SPEECH,
    "/images/generations": IMAGE_GENERATIONS,
    "/images/edits": IMAGE_EDITS,
    "/images/variations": IMAGE_VARIATIONS,
}
"""Fields by endpoint."""
