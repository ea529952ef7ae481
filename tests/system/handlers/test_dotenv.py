from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.handlers.config.dockerfile import make_dockerfile
from ovmstrio.handlers.config.dotenv import parse_dotenv
from ovmstrio.handlers.config.project_file import read_project
from tests.support.examples import examples
from tests.support.projects import write

_OUTSIDE = {"PATH": os.environ["PATH"], "HOME": "/home/me", "EMPTY": ""}
_words = st.text(st.sampled_from("ab 1=#:/.,-_éß@%+~'\"\\$\t"), max_size=8)


def _by_bash(text: str, folder: Path) -> dict[str, str]:
    (folder / ".env").write_text(text)
    command = ["bash", "-c", "set -a; source ./.env; env -0"]
    done = subprocess.run(command, cwd=folder, env=_OUTSIDE, capture_output=True, check=True)
    pairs = (pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    return {name: value for name, value in pairs if name not in {*_OUTSIDE, "PWD", "SHLVL", "_", "OLDPWD"}}


def _read(text: str) -> dict[str, str]:
    variables, problems = parse_dotenv(text, _OUTSIDE, ".env")
    assert problems == []
    return variables


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n# nothing\n\n",
        "A=1\nB=2\n",
        "A=1",
        "  A=1   # a comment\n",
        "export A=1\nexport   B=2;C=3\n",
        "A=a#b\nB= # empty\nC=\n",
        "A='it $HOME is'\nB=\"it $HOME is\"\nC=$HOME/x\n",
        'A="say \\"hi\\" for \\$5 \\\\ \\n"\n',
        "A=a\\ b\\$c\\\\d\n",
        "A='a'\"b\"c\\'d\n",
        "A=1\nB=${A}2\nC=${NONE:-no}${EMPTY:-also}${EMPTY-kept}x\nD=${NONE}$NONE.\n",
        "A='two\nlines'\nB=\"two\nmore\"\nC=on\\\ne\n",
        "A=https://user:pass@host/?q=1,2\n",
        'A=$\nB=a$ \nC="$ 5"\n',
        "A=1\nA=2\nexport A\n",
        "A=grüße\n",
        "A=~\nB=~/x\nC='~'\nD=x~\n",
        "A=1 B=2\nexport C=3 D=4\n",
    ],
    ids=repr,
)
def test_assignments_are_read_as_bash_does(text: str, tmp_path: Path) -> None:
    assert _read(text) == _by_bash(text, tmp_path)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(_words, min_size=1, max_size=12))
def test_any_values_in_single_quotes_are_read_as_bash_does(
    tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    lines = [f"V{i}='{word.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'" for i, word in enumerate(words)]
    escaped = [word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") for word in words]
    text = "\n".join([*lines, *(f'W{i}="{word}"' for i, word in enumerate(escaped))])
    assert _read(text) == _by_bash(text, tmp_path_factory.mktemp("env"))


@given(st.text(st.sampled_from("AB=ab '\"\\$#\n{}()`;:-"), max_size=30))
def test_any_text_is_variables_or_problems(text: str) -> None:
    _, problems = parse_dotenv(text, _OUTSIDE, ".env")
    assert all(problem.line is not None and 1 <= problem.line <= text.count("\n") + 1 for problem in problems)


def test_carriage_returns_are_not_part_of_values() -> None:
    assert _read("A=1\r\nB=2\r\n") == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("just words", "not an assignment"),
        ("if true; then", "not an assignment"),
        ("A = 1", "not an assignment"),
        ("1A=1", "not an assignment"),
        ("A=$(date)", "command substitution is not supported; write the result"),
        ('A="`date`"', "command substitution is not supported; write the result"),
        ("A=a|b", "the shell syntax | is not supported: quote it"),
        ("A=a&b", "the shell syntax & is not supported: quote it"),
        ("A=${B%x}", "this expansion is not supported; write the result"),
        ("A='open", "unterminated quote '"),
        ('A="open', 'unterminated quote "'),
    ],
)
def test_unsupported_syntax_of_shells_is_reported(line: str, message: str) -> None:
    variables, problems = parse_dotenv(f"X=1\n{line}\n", _OUTSIDE, "some/.env")
    assert variables == {"X": "1"}
    assert (problems[0].file, problems[0].line, problems[0].message) == ("some/.env", 2, message)
    assert problems[0].found == f'"{line}"'.replace('"A="', '"A=\\"').replace('`"', '`\\"')


def test_every_problem_is_reported() -> None:
    variables, problems = parse_dotenv("A=$(a)\nB=2\nwhat\nC=3\n", {}, ".env")
    assert variables == {"B": "2", "C": "3"}
    assert [problem.line for problem in problems] == [1, 3]


@settings(max_examples=examples(40), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))
def test_any_value_of_env_reaches_the_build_of_an_image(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    folder = tmp_path_factory.mktemp("project")
    project, _ = read_project(write(folder / "iris", requirements__txt=""))
    text = make_dockerfile(project.model_copy(update={"env": {"A": value}}), folder, "1")
    (export,) = re.findall(r"^RUN set -e; \\\n +(.*); \\$", text, re.MULTILINE)
    assert "<" not in export
    done = subprocess.run(
        ["bash", "-c", f'{export}; printf %s "$A"'], env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True
    )
    assert done.stdout.decode() == value
