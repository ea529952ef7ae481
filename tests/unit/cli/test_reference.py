"""The reference of the command line, as the documentation has it."""

from __future__ import annotations

import re
from pathlib import Path

from ovms_cli.reference import cleaned, reference

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_the_reference_is_what_the_commands_say() -> None:
    """A changed option is a changed page; ``just docs`` writes it again."""
    assert reference() == PAGE.read_text(encoding="utf-8")


def test_the_reference_is_markdown_and_nothing_else() -> None:
    """There are no entities and no tags in it, and every summary is a whole sentence."""
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"&#?\w+;", text)
    outside_of_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"(?<!\\)</?[a-z]", outside_of_code)
    assert not re.findall(r"^\* `.*\.\.\.$", text, re.MULTILINE)
    assert (
        "* `stop`: Stop the pipeline services of a folder's **ProcessInfo.json**, and wait until they have ended."
        in text
    )


def test_what_is_no_tag_is_shown_as_it_stands() -> None:
    """In code nothing is changed but entities; outside of it nothing is hidden."""
    given = '<span style="font-weight: bold">-c</span> lib_&lt;name&gt;.so `a&lt;b&gt;` 1&lt;=x  [default: (9)]'
    assert cleaned(given) == "**-c** lib_\\<name>.so `a<b>` 1<=x  [default: 9]"
