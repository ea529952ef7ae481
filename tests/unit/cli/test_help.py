from __future__ import annotations

import re

import pytest

from ovmstrio.cli.main import COMMANDS, PANELS
from ovmstrio.server.settings import GROUPS, IGNORED, ServerSettings
from tests.support.commands import all_commands, run_command

pytestmark = pytest.mark.usefixtures("command_folder")

COMMAND_PATHS = sorted(all_commands())


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){_spelt(name)}(?![\w-])", text) is not None


def test_the_commands_are_listed_in_panels() -> None:
    done = run_command("--help")
    assert done.exit_code == 0
    for panel, commands in PANELS.items():
        rows = done.stdout.partition(f"{panel}:\n")[2].partition("\n\n")[0]
        assert [row.split()[0] for row in rows.splitlines()] == list(commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_listed_command_has_help(command: str) -> None:
    done = run_command(command, "--help")
    assert (done.exit_code, done.stdout.split()[:3]) == (0, ["Usage:", "ovms", command])


def test_the_help_of_serve_fits_a_screen_and_has_real_metavars_choices_and_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run_command("serve", "--help").stdout
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    for part in ("--rest-port PORT", "[default: 8000]", "--log-level TRACE|DEBUG|INFO|WARNING|ERROR"):
        assert part in text
    assert 15 <= sum(_shown(name, text) for name in ServerSettings.model_fields) <= 25


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_are_never_cut_and_lines_fit_the_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = run_command("serve", "--help-all").stdout
    assert [name for name in ServerSettings.model_fields if not _shown(name, text)] == []
    assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1 and "|" not in line] == []


def test_options_without_effect_are_named_only_where_all_are_shown() -> None:
    short, full = (run_command("serve", option).stdout for option in ("--help", "--help-all"))
    for name in IGNORED:
        assert (_shown(name, short), _shown(name, full)) == (False, True)
    rows = [line.split()[0] for line in full.splitlines() if line.startswith("  --")]
    assert {_spelt(name) for name in IGNORED}.isdisjoint(rows)


@pytest.mark.parametrize("topic", GROUPS)
def test_a_topic_shows_the_options_of_one_group(topic: str) -> None:
    done = run_command("help", topic)
    assert done.exit_code == 0
    idle = {*IGNORED, "pipeline_type"}
    for name, field in ServerSettings.model_fields.items():
        group = field.json_schema_extra
        title = GROUPS["compatibility"] if name in idle else isinstance(group, dict) and group["group"]
        rows = [line for line in done.stdout.splitlines() if line.startswith("  --")]
        assert any(_shown(name, row) for row in rows) == (title == GROUPS[topic]), name


def test_help_lists_the_topics_and_explains_commands() -> None:
    listed = run_command("help").stdout
    assert all(re.search(rf"^  {topic}  ", listed, re.MULTILINE) for topic in GROUPS)
    assert run_command("help", "sequence", "list").stdout.startswith("Usage: ovms sequence list [OPTIONS] MODEL")


def test_an_unknown_topic_is_a_usage_error_with_suggestions() -> None:
    done = run_command("help", "securty")
    assert (done.exit_code, "Did you mean security?" in done.stderr) == (64, True), done.stderr


@pytest.mark.parametrize("path", COMMAND_PATHS)
def test_every_option_is_declared_with_hyphens_a_metavar_and_a_sentence(path: str) -> None:
    for param in all_commands()[path]:
        assert not any("_" in name for name in (*param.opts, *param.secondary_opts) if name.startswith("-"))
        is_flag = param.param_type_name == "option" and param.is_flag
        assert is_flag or param.metavar, param.name
        assert re.fullmatch(r"(gRPC|[A-Z]).*[.:]", param.help or "", re.DOTALL), (param.name, param.help)


@pytest.mark.parametrize("option", ["--sequence-id", "--sequence_id"])
def test_options_of_subcommands_accept_underscores(option: str) -> None:
    done = run_command("sequence", "run", option, "no number")
    assert (done.exit_code, "'--sequence-id'" in done.stderr) == (64, True), done.stderr


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("serve --rest_prt 1", "No such option: --rest-prt. Did you mean --rest-port"),
        ("chat --max_tokns 1", "No such option: --max-tokns. Did you mean --max-tokens"),
        ("serv", "No such command 'serv'. Did you mean serve?"),
    ],
)
def test_errors_suggest_names_with_hyphens(line: str, suggestion: str) -> None:
    done = run_command(*line.split())
    assert (done.exit_code, suggestion in done.stderr) == (64, True), done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run", "paddle run"),
        ("stop", "paddle stop"),
        ("trace", "paddle trace"),
        ("generate", "handler dockerfile"),
        ("sequences", "sequence list"),
    ],
)
def test_an_old_name_of_a_command_works_with_a_note(old: str, new: str) -> None:
    done = run_command(old, "--help")
    assert done.stdout == run_command(*new.split(), "--help").stdout
    assert f"ovms {old} is deprecated; use ovms {new}\n" in done.stderr
    assert re.search(rf"^  {old} ", run_command("--help").stdout, re.MULTILINE) is None


def test_output_with_a_format_works_with_a_note_and_otherwise_names_a_file() -> None:
    old, new = (run_command("prepare", "--list", option, "json") for option in ("--output", "--format"))
    assert (old.exit_code, old.stdout) == (0, new.stdout)
    assert old.stderr == "--output json is deprecated; use --format json: --output names a file\n"
    for model in ("infer", "sequence run"):
        done = run_command(*model.split(), "--model", "m", "--input", "x.npy", "--output", "text.txt")
        assert (done.exit_code, "expected a file ending in .n" in done.stderr) == (64, True), done.stderr
