"""Requests to models for which a second model, or the prompt, proposes tokens: what these can, and others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import GenerationRequest

__all__ = ["check_proposing"]

_UNSUPPORTED: Final = "unsupported_parameter"
_NEEDS: Final[Mapping[str, str]] = {
    "num_assistant_tokens": "a model that drafts (draft_models_path) or prompt_lookup",
    "assistant_confidence_threshold": "a model that drafts (draft_models_path)",
    "max_ngram_size": "prompt_lookup",
}


def check_proposing(spec: TextModelSpec, asked: GenerationRequest) -> None:
    """See that a request asks for nothing that needs, or does not go with, tokens that are proposed.

    Raises:
        InvalidField: it does.
    """
    drafts, looks_up = spec.draft_path is not None, spec.looks_up
    has = {
        "num_assistant_tokens": drafts or looks_up,
        "assistant_confidence_threshold": drafts and not looks_up,
        "max_ngram_size": looks_up,
    }
    for field, is_there in has.items():
        if not is_there and getattr(asked.sampling, field) is not None:
            message = f"{field} is not supported: this model is served without {_NEEDS[field]}; leave it out"
            raise InvalidField(message, field=field, code=_UNSUPPORTED)
    if (drafts or looks_up) and asked.sampling.best_of > 1:
        raise InvalidField(
            "best_of above 1 is not supported for this model, whose tokens are proposed and then checked; leave it out",
            field="best_of",
            code=_UNSUPPORTED,
        )
    if drafts and asked.logprobs:
        raise InvalidField(
            "logprobs are not supported for this model: the library has none of tokens that another one has drafted",
            field="logprobs",
            code=_UNSUPPORTED,
        )
