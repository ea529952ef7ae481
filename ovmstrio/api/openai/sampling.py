"""How tokens are to be chosen, as bodies of chat, completions and responses say it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.generation import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.api.openai.fields import Fields
    from ovmstrio.core.generation import GenerationLimits, TokenIds

__all__ = ["read_max_tokens", "read_number_of_texts", "read_sampling", "read_stop", "refuse_unserved"]

_MOST_STOPS: Final = 16
_MAX_STOP_CHARACTERS: Final = 1024
"""Of a text that ends an answer, with which each character of the answer is compared."""
_MOST_PROPOSED: Final = 100
"""Of tokens at a time, which are computed whether or not they are right."""
_GREATEST: Final = 1e6
"""Of penalties that have no bounds of their own."""

_UNSERVED: Final[Mapping[str, str]] = {
    "logit_bias": "the library chooses tokens without biases",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prompt_logprobs": "use echo and logprobs of /completions",
    "audio": "this model makes text only",
    "web_search_options": "this server searches nothing",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "use response_format"),
    "use_beam_search": "use best_of",
    "no_repeat_ngram_size": "use repetition_penalty",
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "the library chooses among all tokens; use response_format"),
    "chat_template": "the template is the model's own",
    "truncate_prompt_tokens": "prompts are not cut; shorten it",
    "store": "nothing is stored; leave it out or send false",
}
"""Fields that would change the answer and cannot, with the reason; saying nothing by them is no fault."""


def read_sampling(fields: Fields, limits: GenerationLimits, *, max_tokens: int | None, is_stream: bool) -> Sampling:
    """Read how tokens are chosen.

    Args:
        fields: of the body.
        limits: of the model.
        max_tokens: as it has been read.
        is_stream: whether the answer is streamed, which beams cannot be.
    """
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=_read_min_tokens(fields, max_tokens),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, "frequency_penalty out of range(-2.0, 2.0)"),
        presence_penalty=fields.number("presence_penalty", -2, 2, "presence_penalty out of range(-2.0, 2.0)"),
        repetition_penalty=_read_repetition_penalty(fields),
        length_penalty=fields.number("length_penalty", -_GREATEST, _GREATEST),
        temperature=fields.number("temperature", 0, 2, "temperature out of range(0.0, 2.0)"),
        top_p=fields.number("top_p", 0, 1, "top_p out of range(0.0, 1.0)"),
        top_k=_read_top_k(fields),
        min_p=fields.number("min_p", 0, 1, "min_p out of range [0.0, 1.0)", excludes_high=True),
        seed=_read_seed(fields),
        ignore_eos=fields.flag("ignore_eos"),
        best_of=_read_best_of(fields, limits, is_stream=is_stream),
        stop_token_ids=_read_stop_token_ids(fields, limits),
        num_assistant_tokens=_read_assistant_tokens(fields),
        assistant_confidence_threshold=_read_confidence(fields),
        max_ngram_size=_read_proposed(fields, "max_ngram_size"),
    )


def read_max_tokens(fields: Fields, limits: GenerationLimits, *names: str, least: int = 1) -> int | None:
    """Read how many tokens are made at most: of several names of it the last one that is there counts."""
    found = None
    for name in names:
        value = fields.unsigned(name, least=least, message=f"{name} value should be greater than 0")
        most = limits.max_tokens_limit
        if value is not None and most is not None and value > most:
            fields.refuse(name, f"{name} exceeds limit provided in graph config: {most}", got=str(value))
        found = found if value is None else value
    return found


def read_number_of_texts(fields: Fields, limits: GenerationLimits, best_of: int) -> int:
    """Read how many texts are made."""
    n = fields.unsigned("n", least=1, message="n value should be greater than 0") or 1
    if n > limits.best_of_limit:
        fields.refuse("n", f"n exceeds limit provided in graph config: {limits.best_of_limit}", got=str(n))
    elif 1 < best_of < n:
        fields.refuse("n", "n value cannot be greater than best_of", got=f"{n} and {best_of}")
    return n


def read_stop(fields: Fields) -> tuple[str, ...]:
    """Read the texts that end an answer."""
    value = fields.get("stop")
    if value is None:
        return ()
    if not isinstance(value, str | list):
        fields.refuse("stop", "stop is not a string or array of strings")
        return ()
    texts = [value] if isinstance(value, str) else value
    if len(texts) > _MOST_STOPS:
        fields.refuse("stop", f"stop array must have no more than {_MOST_STOPS} strings", got=str(len(texts)))
        return ()
    if not all(isinstance(text, str) for text in texts):
        fields.refuse("stop", "stop array contains non string element")
        return ()
    if any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        longest = max(map(len, texts))
        fields.refuse("stop", f"stop: expected at most {_MAX_STOP_CHARACTERS} characters each", got=str(longest))
        return ()
    if not all(texts):
        fields.refuse("stop", "stop array contains an empty string")
        return ()
    return tuple(dict.fromkeys(texts))


def refuse_unserved(fields: Fields) -> None:
    """Refuse what would be passed over otherwise, and change the answer for those who count on it."""
    for name, reason in _UNSERVED.items():
        if fields.get(name):
            fields.refuse(name, f"{name} is not supported: {reason}", code="unsupported_parameter")


def _read_min_tokens(fields: Fields, max_tokens: int | None) -> int | None:
    least = fields.unsigned("min_tokens")
    if least is not None and max_tokens is not None and least > max_tokens:
        fields.refuse("min_tokens", "min_tokens is greater than max_tokens", got=f"{least} and {max_tokens}")
    return least


def _read_repetition_penalty(fields: Fields) -> float | None:
    penalty = fields.number("repetition_penalty", 0, _GREATEST)
    if penalty == 0:
        fields.refuse("repetition_penalty", "repetition_penalty is not a valid number", got="0")
        return None
    return penalty


def _read_top_k(fields: Fields) -> int | None:
    top_k = fields.whole("top_k", "top_k is not an integer")
    if top_k is not None and top_k < 1 and top_k != -1:
        fields.refuse("top_k", "top_k must be -1 (all tokens) or a positive integer", got=str(top_k))
        return None
    return top_k


def _read_seed(fields: Fields) -> int | None:
    seed = fields.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        fields.refuse("seed", "seed out of range [0, 4294967295]", got=str(seed))
        return None
    return fields.unsigned("seed")


def _read_best_of(fields: Fields, limits: GenerationLimits, *, is_stream: bool) -> int:
    best_of = fields.unsigned("best_of", least=1, message="best_of value should be greater than 0") or 1
    if best_of > limits.best_of_limit:
        most = f"best_of exceeds limit provided in graph config: {limits.best_of_limit}"
        fields.refuse("best_of", most, got=str(best_of))
    elif best_of > 1 and is_stream:
        fields.refuse("best_of", "best_of cannot be used in streaming mode")
    return best_of


def _read_assistant_tokens(fields: Fields) -> int | None:
    number = _read_proposed(fields, "num_assistant_tokens")
    if number is not None and fields.get("assistant_confidence_threshold") is not None:
        told = "num_assistant_tokens and assistant_confidence_threshold are mutually exclusive and cannot both be set"
        fields.refuse("num_assistant_tokens", told)
    return number


def _read_proposed(fields: Fields, name: str) -> int | None:
    number = fields.unsigned(name, least=1)
    if number is not None and number > _MOST_PROPOSED:
        fields.refuse(name, f"{name} value can't be greater than {_MOST_PROPOSED}", got=str(number))
        return None
    return number


def _read_confidence(fields: Fields) -> float | None:
    threshold = fields.number("assistant_confidence_threshold", 0, 1)
    if threshold == 0:
        fields.refuse("assistant_confidence_threshold", "assistant_confidence_threshold should be above 0", got="0")
        return None
    return threshold


def _read_stop_token_ids(fields: Fields, limits: GenerationLimits) -> TokenIds:
    ids = fields.items("stop_token_ids")
    if not ids:
        return ()
    most = limits.vocabulary_size or 2**31
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < most for each in ids):
        fields.refuse("stop_token_ids", f"stop_token_ids: expected numbers of tokens from 0 to {most - 1}")
        return ()
    return tuple(ids)
