"""Forms are tried one after the other, each once, and what is wrong with one is told to whoever asked for it."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind
from ovmstrio.openvino.engine.form_compiler import FormCompiler
from ovmstrio.openvino.engine.form_trials import FormTrials
from ovmstrio.openvino.engine.texts import AskedTexts

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS: Final = 30


class _Compiler:
    """Takes all forms but those that it has an error for."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.compiled: list[str] = []

    def ask(self, request: GenerationRequest) -> str:
        return "" if request.grammar is None else request.grammar.text

    def compile(self, config: Any) -> None:
        self.compiled.append(config)
        if config in self.errors:
            raise self.errors[config]


def _asked(number: int, form: str) -> AskedTexts:
    request = GenerationRequest("", grammar=Grammar(GrammarKind.REGEX, form))
    return AskedTexts(number, 0, request, [1], 10, 1, is_proven=False)


def _ended(trials: FormTrials) -> Any:
    """Wait for the end of the trial that runs, and take it."""
    while not trials.has_ended:
        assert select.select([trials.descriptor], [], [], _SECONDS)[0], "no trial has ended"
    return trials.take()


def _run(trials: FormTrials) -> list[tuple[int, str]]:
    """Try all; gives who was told what, in their order."""
    told = []
    while trials.waiting:
        trials.go_on(may_compile=True)
        asked, error = _ended(trials)
        told.append((asked.id, "" if error is None else str(error)))
    return told


def test_a_form_is_compiled_once_for_all_who_ask_for_it() -> None:
    """Also for those who ask later; requests come out in the order in which they have come."""
    compiler = _Compiler()
    trials = FormTrials(compiler)
    asked = [_asked(number, form) for number, form in enumerate("abab")]
    for each in asked:
        trials.wait(each)
    assert trials.waiting == len(asked)
    assert _run(trials) == [(0, ""), (1, ""), (2, ""), (3, "")]
    trials.wait(_asked(4, "a"))
    assert _run(trials) == [(4, "")]
    assert compiler.compiled == ["a", "b"]
    assert all(each.is_proven for each in asked)


def test_a_form_that_the_library_does_not_take_is_told_each_time() -> None:
    """And the one behind it is compiled nevertheless."""
    compiler = _Compiler(a=RuntimeError("there is no such form"))
    trials = FormTrials(compiler)
    for number, form in enumerate("aab"):
        trials.wait(_asked(number, form))
    told = _run(trials)
    assert [number for number, why in told if "there is no such form" in why] == [0, 1]
    assert told[2] == (2, "")
    assert compiler.compiled == ["a", "a", "b"]


def test_a_form_that_could_not_be_tried_is_left_to_the_batch() -> None:
    """Its request goes on, and the batch is told that nobody knows the form."""
    trials = FormTrials(_Compiler(a=FileNotFoundError("openvino_model.xml")))
    asked = _asked(1, "a")
    trials.wait(asked)
    assert _run(trials) == [(1, "")]
    assert not asked.is_proven


@pytest.mark.parametrize("runs", [False, True])
def test_whoever_leaves_is_told_nothing_and_the_next_one_is_tried(*, runs: bool) -> None:
    """Whether the form is being compiled already, or waits for that."""
    compiler = _Compiler()
    trials = FormTrials(compiler)
    asked = [_asked(number, form) for number, form in enumerate("abc")]
    for each in asked:
        trials.wait(each)
    trials.go_on(may_compile=True)
    leaving = asked[0] if runs else asked[1]
    assert trials.withdraw(leaving)
    assert not trials.withdraw(leaving)
    assert trials.waiting == 2
    first = _ended(trials)
    assert (first is None) is runs
    assert [number for number, _ in _run(trials)] == ([1, 2] if runs else [2])
    assert compiler.compiled == (["a", "b", "c"] if runs else ["a", "c"])


def test_while_nothing_may_be_compiled_only_forms_that_are_known_pass() -> None:
    """A new one waits, and those behind it, until it may be."""
    compiler = _Compiler()
    trials = FormTrials(compiler)
    trials.wait(_asked(0, "a"))
    assert _run(trials) == [(0, "")]
    for number, form in enumerate("aab", 1):
        trials.wait(_asked(number, form))
    for number in (1, 2):
        trials.go_on(may_compile=False)
        assert trials.has_ended
        passed, _ = _ended(trials)
        assert passed.id == number
    trials.go_on(may_compile=False)
    assert not trials.has_ended
    assert compiler.compiled == ["a"]
    assert _run(trials) == [(3, "")]


class _Unmade(FormCompiler):
    def _make(self) -> NoReturn:
        raise RuntimeError("there is no room on the disk")


def test_a_form_is_not_to_blame_where_none_can_be_tried(tmp_path: Path) -> None:
    """It is left to the batch, as where there is no file of the model."""
    none: Any = None
    with pytest.raises(LookupError, match="no form can be tried: there is no room on the disk"):
        _Unmade(none, tmp_path).compile(none)
