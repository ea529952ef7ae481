"""What stands around the tokens of a text, and between those of two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import openvino as ov

__all__ = ["SpecialTokens", "Template", "read_special_tokens"]

COMBINE: Final = "CombineSegments"
_TEMPLATES: Final = "processed_post_processor_template"
_PARTS_OF_INPUT: Final = 3
_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class Template:
    """Tokens before, between and behind texts, a place more than there are texts; ``types`` is the one of each text.

    ``mark_types`` has the types of the tokens at those places.
    """

    marks: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]
    mark_types: tuple[tuple[int, ...], ...]

    @property
    def added(self) -> int:
        """How many tokens come to those of the texts."""
        return sum(map(len, self.marks))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What is put around one text, and around two that belong together, None where that is not known."""

    single: Template
    pair: Template | None


def read_special_tokens(model: ov.Model, combine: ov.Node | None) -> SpecialTokens:
    """Read them out of a tokenizer as it was converted.

    Args:
        model: the tokenizer, whose ``rt_info`` may have templates.
        combine: the operation that puts marks around a text; None in a tokenizer that has none.
    """
    single = _of_operation(combine) if combine is not None else Template(((), ()), (0,), ((), ()))
    written = _templates(model)
    pair = _of_template(written["pair"], _PAIR) if "pair" in written else _as_bert_does(single)
    return SpecialTokens(single, pair)


def _of_operation(combine: ov.Node) -> Template:
    """Read what the operation joins: parts of three inputs each, constants but for the text."""
    marks: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    of_text = 0
    segments = combine.input_value(combine.get_input_size() - 1).get_node().get_data().reshape(-1).tolist()
    for number in range((combine.get_input_size() - 1) // _PARTS_OF_INPUT):
        begin, end, ids = (combine.input_value(_PARTS_OF_INPUT * number + each).get_node() for each in range(3))
        if ids.get_type_name() != "Constant":
            of_text = int(segments[number])
            marks.append([])
            types.append([])
            continue
        first, last = (int(each.get_data().reshape(-1)[0]) for each in (begin, end))
        added = ids.get_data().reshape(-1)[first:last].tolist()
        marks[-1] += added
        types[-1] += [int(segments[number])] * len(added)
    return Template(_frozen(marks), (of_text,), _frozen(types))


def _of_template(written: Mapping[str, Any], texts: int) -> Template | None:
    """Read a list of tokens, those below 0 standing for texts; None if it is no such list."""
    marks: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    of_texts = []
    for ids, kind in zip(written["ids"], written["type_ids"], strict=True):
        if not isinstance(ids, list) and ids < 0:
            of_texts.append(int(kind))
            marks.append([])
            types.append([])
            continue
        added = ids if isinstance(ids, list) else [ids]
        marks[-1] += added
        types[-1] += [int(kind)] * len(added)
    return Template(_frozen(marks), tuple(of_texts), _frozen(types)) if len(of_texts) == texts else None


def _as_bert_does(single: Template) -> Template | None:
    """Repeat behind the second text what stands behind the first."""
    before, behind = single.marks
    if not behind:
        return None
    types = (tuple(0 for _ in before), tuple(0 for _ in behind), tuple(1 for _ in behind))
    return Template((before, behind, behind), (0, 1), types)


def _templates(model: ov.Model) -> Mapping[str, Any]:
    if not model.has_rt_info(_TEMPLATES):
        return {}
    try:
        written = json.loads(str(model.get_rt_info(_TEMPLATES).value))
    except ValueError:
        return {}
    return written if isinstance(written, dict) else {}


def _frozen(lists: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each) for each in lists)
