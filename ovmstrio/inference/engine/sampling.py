"""Generation settings of the library from the sampling parameters of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import openvino_genai as genai

from ovmstrio.core.generation import Grammar, GrammarKind

if TYPE_CHECKING:
    from ovmstrio.core.generation import Sampling

DEFAULT_TOP_K: Final = 40


NO_TOP_K: Final = 2**64 - 1
"""The library's value for no top-k limit."""


_SAME_NAMES: Final = (
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "length_penalty",
    "ignore_eos",
    "max_ngram_size",
)


_GRAMMARS: Final = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.JSON_OBJECT: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tags_config",
}


_ANY_OBJECT: Final = '{"type": "object"}'


def configure_generation(
    config: Any, sampling: Sampling, *, texts: int = 1, seed: int = 0, grammar: Grammar | None = None
) -> Any:
    """Set sampling parameters on ``config``, the model's defaults, and return it; RuntimeError if a value is invalid.

    The caller sets the length. ``texts`` is the number of sequences returned from beam search.
    """
    for name in _SAME_NAMES:
        value = getattr(sampling, name)
        if value is not None:
            setattr(config, name, value)
    _set_draft(config, sampling)
    if sampling.stop_token_ids:
        config.stop_token_ids = {*config.stop_token_ids, *sampling.stop_token_ids}
    if sampling.best_of > 1:
        config.num_beams = sampling.best_of
        config.num_return_sequences = texts
        config.do_sample = False
    else:
        _set_sampling(config, sampling, seed)
    if grammar is not None:
        set_grammar(config, grammar)
    return config


def set_grammar(config: Any, grammar: Grammar) -> None:
    """Set the grammar of ``config``."""
    text = _ANY_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    form = genai.StructuredOutputConfig()
    setattr(form, _GRAMMARS[grammar.kind], text)
    config.structured_output_config = form


def _set_sampling(config: Any, sampling: Sampling, seed: int) -> None:
    temperature = config.temperature if sampling.temperature is None else sampling.temperature
    config.do_sample = temperature > 0
    if not config.do_sample:
        return
    config.temperature = temperature
    config.rng_seed = seed
    if sampling.top_k is not None:
        config.top_k = sampling.top_k if sampling.top_k > 0 else NO_TOP_K
    elif config.top_k == NO_TOP_K:
        config.top_k = DEFAULT_TOP_K


def _set_draft(config: Any, sampling: Sampling) -> None:
    """Set the number of draft tokens: fixed, or while the draft model's confidence is high enough."""
    if sampling.num_assistant_tokens is not None:
        config.num_assistant_tokens, config.assistant_confidence_threshold = sampling.num_assistant_tokens, 0.0
    elif sampling.assistant_confidence_threshold is not None:
        config.num_assistant_tokens = 0
        config.assistant_confidence_threshold = sampling.assistant_confidence_threshold
