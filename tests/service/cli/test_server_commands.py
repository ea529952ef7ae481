from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.speedscope_format import check_speedscope

both_protocols = pytest.mark.parametrize("protocol", ["gRPC", "REST"])
INTERVAL = ("--once", "--interval", "0.1")


def test_top_prints_one_interval_in_every_format(server: ServedInThread) -> None:
    target = ("top", "--url", server.http, *INTERVAL)
    table, as_json, as_csv = (run_command(*target, "--format", form) for form in ("table", "json", "csv"))
    assert [each.exit_code for each in (table, as_json, as_csv)] == [0, 0, 0]
    titles, *rows = (line.split()[:3] for line in table.stdout.splitlines())
    assert titles == ["servable", "version", "state"]
    assert ["pixels", "1", "READY"] in rows
    document = json.loads(as_json.stdout)
    (pixels,) = (each for each in document["servables"] if each["name"] == "pixels")
    assert (document["ready"], pixels["requests_per_second"]) == (False, 0)
    assert document["resident_bytes"] > 2**20
    assert document["connections"]["REST"] >= 1
    (values,) = (row for row in csv.DictReader(io.StringIO(as_csv.stdout)) if row["name"] == "pixels")
    assert (values["in_flight"], values["p50_ms"]) == ("0", "")
    stages = run_command(*target, "--stages", "diamond", "--format", "json")
    assert set(json.loads(stages.stdout)["ops"]) == {"all_sizes", "join", "petal_only", "read"}, stages.stderr


def test_top_reports_disabled_metrics() -> None:
    with serving_in_thread(metrics_enable=False, allow_empty=True) as server:
        done = run_command("top", "--url", server.http, *INTERVAL)
    assert (done.exit_code, "metrics are disabled" in done.stderr) == (1, True), done.stderr


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "b.npy"
    np.save(path, np.arange(10, dtype=np.float32))
    return str(path)


def _call(server: ServedInThread, protocol: str, command: str, *arguments: str, stdin: str = "") -> CommandResult:
    url = server.rest if protocol == "REST" else f"grpc://{server.grpc}"
    return run_command(command, "--url", url, *arguments, stdin=stdin)


def _infer(server: ServedInThread, protocol: str, model: str, given: str, *more: str, stdin: str = "") -> CommandResult:
    return _call(server, protocol, "infer", "--format", "json", "--model", model, "--input", given, *more, stdin=stdin)


def _outputs(result: CommandResult) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@both_protocols
def test_infer_prints_outputs_as_json_and_notes_to_standard_error(
    server: ServedInThread, file: str, protocol: str
) -> None:
    done = _infer(server, protocol, "dummy", file)
    assert _outputs(done) == {"a": [[float(value) for value in range(1, 11)]]}
    assert "batch axis" in done.stderr


@both_protocols
def test_infer_takes_a_name_and_inputs_as_files_json_and_standard_input(
    server: ServedInThread, file: str, protocol: str
) -> None:
    expected = {"a": [[float(value) for value in range(1, 11)]]}
    row = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    for given in (file, f"b={file}", row, f"[{row}]", f"b={row}", f'{{"b": {row}}}'):
        assert _outputs(_call(server, protocol, "infer", "dummy", given, "--json")) == expected
    content = Path(file).read_bytes()
    url = server.rest if protocol == "REST" else server.grpc
    for stdin in (content, row):
        assert _outputs(run_command("infer", "dummy", "-", "--url", url, "--json", stdin=stdin)) == expected
    assert _outputs(_call(server, protocol, "infer", file, "--model", "dummy", "--json")) == expected


def test_infer_takes_several_inputs_by_name(server: ServedInThread) -> None:
    done = _call(server, "gRPC", "infer", "labels_image", "labels=gold,navy", "image=[[[0, 0, 90]]]", "--json")
    assert _outputs(done) == {"result": ["navy"]}
    assert _outputs(_call(server, "gRPC", "infer", "incrementer", "[1, 2.5]", "--json")) == {"last_number": [4, 5.5]}
    assert _outputs(_call(server, "REST", "infer", "adder", "[1, 2, 3.5]", "--json")) == {"sum": 6.5}
    done = _call(server, "gRPC", "infer", "dummy", "[1, 2")
    assert (done.exit_code, "[1, 2: not JSON" in done.stderr) == (1, True), done.stderr


def test_infer_saves_outputs_and_prints_latencies(server: ServedInThread, file: str, tmp_path: Path) -> None:
    saved = tmp_path / "a.npy"
    options = ("--output", str(saved), "--repeat", "5")
    done = _call(server, "gRPC", "infer", "--model", "dummy", "--input", f"b={file}", *options)
    assert done.exit_code == 0, done.stderr
    np.testing.assert_array_equal(np.load(saved), np.arange(1, 11, dtype=np.float32)[None])
    assert "5 calls" in done.stderr
    assert "median" in done.stderr


@both_protocols
def test_an_encoded_image_is_decoded_by_the_server(server: ServedInThread, tmp_path: Path, protocol: str) -> None:
    picture = tmp_path / "i.png"
    Image.new("L", (9, 7), 200).save(picture)
    done = _infer(server, protocol, "pixels", str(picture), "--encoded")
    assert _outputs(done)["pixels"] == np.full((1, 4, 4, 1), 200.0).tolist()


@both_protocols
def test_a_stateful_model_is_refused_with_the_command_for_sequences(server: ServedInThread, protocol: str) -> None:
    done = _infer(server, protocol, "sum", "-", stdin="[[1, 2]]")
    assert (done.exit_code, "Sequence ID has not been provided" in done.stderr) == (1, True)
    assert "sum serves sequences: ovms sequence run --model sum" in done.stderr


def test_models_lists_inputs_and_states(server: ServedInThread) -> None:
    entries = {(each["name"], each["version"]): each for each in _outputs(_call(server, "gRPC", "models", "--json"))}
    dummy = entries["dummy", "1"]
    assert (dummy["state"], dummy["inputs"]) == ("READY", [{"name": "b", "datatype": "FP32", "shape": [1, 10]}])
    shapes = {version: each["inputs"][0]["shape"] for (name, version), each in entries.items() if name == "two"}
    assert shapes == {"1": [2, 3], "2": [4, 5]}
    rows = _call(server, "gRPC", "models", "dummy", "--format", "csv").stdout.split("\n")
    assert rows[1] == 'dummy,1,READY,"b FP32 [1, 10]","a FP32 [1, 10]",'
    assert _call(server, "gRPC", "models", "unknown").exit_code == 1
    rows = _call(server, "gRPC", "models", "incrementer", "--format", "csv").stdout.split("\n")
    assert rows[1] == "incrementer,1,READY,first_number,last_number,"


@both_protocols
def test_models_shows_why_a_model_failed_to_load(server: ServedInThread, protocol: str) -> None:
    (entry,) = _outputs(_call(server, protocol, "models", "damaged", "--json"))
    assert entry["state"] == "UNAVAILABLE"
    assert "cannot read the model" in entry["reason"]


def test_health_is_an_exit_code(server: ServedInThread) -> None:
    (port,) = free_ports(1)
    for url in (server.grpc, server.rest, server.http):
        done = run_command("health", "--model", "dummy", "--url", url)
        assert (done.exit_code, done.stdout) == (0, "ready\n"), done.stderr
    assert run_command("health", "--live", "--url", f"grpc://{server.grpc}").exit_code == 0
    assert run_command("health", "--model", "unknown", "--url", server.rest).exit_code == 1
    assert run_command("health", "--url", f"127.0.0.1:{port}").exit_code == 2


@both_protocols
@pytest.mark.parametrize(
    ("given", "answered"), [('{"first_number": [3]}', [6]), ("[1, 2.5]", [4.0, 5.5]), ('{"first_number": 7}', [10])]
)
def test_numbers_for_a_graph_get_a_type_by_their_values(
    server: ServedInThread, protocol: str, given: str, answered: list[float]
) -> None:
    assert _outputs(_infer(server, protocol, "incrementer", "-", stdin=given)) == {"last_number": answered}


def test_inputs_of_a_graph_keep_their_type_and_come_from_one_document(server: ServedInThread, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[250, 1]], np.uint8))
    answer = tmp_path / "y.npy"
    done = _infer(server, "gRPC", "incrementer", str(tmp_path / "x.npy"), "--output", str(answer))
    assert done.exit_code == 0, done.stderr
    saved = np.load(answer)
    assert (saved.dtype, saved.tolist()) == (np.uint8, [[253, 4]])
    given = json.dumps({"labels": "gold,navy", "image": [[[0, 0, 90]]]})
    assert _outputs(_infer(server, "gRPC", "labels_image", "-", stdin=given)) == {"result": ["navy"]}


@both_protocols
def test_the_stream_of_a_graph_is_joined(server: ServedInThread, protocol: str) -> None:
    done = _infer(server, protocol, "counter_stream", "text=a few words")
    assert _outputs(done) == {"word": ["afewwords"], "count": [3]}
    assert "counter_stream streams: 3 pieces joined" in done.stderr


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ('{"image": [1]}', ["missing: labels"]),
        (
            '{"image": [1, "a"], "labels": {}}',
            [
                'input "image": expected numbers, truth values or texts, got texts and numbers together',
                'input "labels"',
            ],
        ),
    ],
)
def test_all_wrong_inputs_of_a_graph_are_reported(server: ServedInThread, given: str, texts: list[str]) -> None:
    done = _infer(server, "gRPC", "labels_image", "-", stdin=given)
    assert done.exit_code == 1
    assert [text for text in texts if text not in done.stderr] == []


@both_protocols
def test_a_pipeline_of_ops_is_called_by_the_given_names(server: ServedInThread, protocol: str) -> None:
    width = _outputs(_infer(server, protocol, "diamond", "x=6.3,3.3,6.0"))["width"]
    assert 1 < float(width[0]) < 3


def test_a_handler_gets_the_file_over_http(server: ServedInThread, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    numbers.write_text("[1, 2, 3.5]")
    assert _outputs(_infer(server, "REST", "adder", str(numbers))) == {"sum": 6.5}
    done = _infer(server, "REST", "adder", "-", stdin='{"a": 1}')
    assert (done.exit_code, done.stdout) == (1, "")
    assert "expected a list of numbers" in done.stderr
    assert _outputs(_infer(server, "gRPC", "adder", str(numbers))) == {"sum": 6.5}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    return str(tmp_path / "rows.npy")


def _run_sequence(server: ServedInThread, *options: str, stdin: bytes = b"") -> CommandResult:
    model = () if "--model" in options else ("--model", "sum")
    url = server.rest if "REST" in options else f"grpc://{server.grpc}"
    options = tuple(option for option in options if option not in {"REST", "gRPC"})
    return run_command("sequence", "run", *model, *options, "--url", url, stdin=stdin)


def _open_sequences(server: ServedInThread, model: str = "sum") -> list[int]:
    listed = server.ask("GET", f"/v2/models/{model}/sequences").json()["sequences"]
    return [each["id"] for each in listed]


@both_protocols
def test_a_sequence_is_run_to_its_end(server: ServedInThread, rows: str, tmp_path: Path, protocol: str) -> None:
    saved = tmp_path / "sums.npz"
    answer = _run_sequence(server, "--input", rows, "--output", str(saved), "--join", "0", protocol)
    assert answer.exit_code == 0, answer.stderr
    np.testing.assert_array_equal(np.load(saved)["y"], np.cumsum(np.load(rows), axis=0))
    assert "has ended" in answer.stdout
    assert "10 steps of 1" in answer.stderr
    assert "steps/s" not in answer.stderr
    assert _open_sequences(server) == []


@both_protocols
def test_steps_are_lines_of_json(server: ServedInThread, rows: str, protocol: str) -> None:
    options = ("--input", "-", "--json", "--sequence-id", str(2**64 - 1), protocol)
    answer = _run_sequence(server, *options, stdin=Path(rows).read_bytes())
    assert answer.exit_code == 0, answer.stderr
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(line["step"], line["sequence_id"]) for line in lines] == [(step, 2**64 - 1) for step in range(10)]
    assert lines[2]["outputs"] == {"y": [[6.0, 9.0]]}


def test_a_sequence_may_have_one_step_and_needs_a_free_id(server: ServedInThread, rows: str, tmp_path: Path) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}

    def step(**parameters: object) -> bool:
        document = {"inputs": [given], "parameters": {"sequence_id": 5, **parameters}}
        return server.ask("POST", "/v2/models/sum/infer", json=document).is_success

    assert step(sequence_start=True)
    refused = _run_sequence(server, "--input", rows, "--sequence-id", "5")
    assert refused.exit_code == 1
    assert "step 1 of 10 in sequence 5: Sequence with provided ID already exists" in refused.stderr
    assert _open_sequences(server) == [5]
    assert step(sequence_end=True)
    np.save(tmp_path / "one.npy", np.array([3, 4], np.float32))
    answer = _run_sequence(server, "--input", str(tmp_path / "one.npy"), "--json")
    assert json.loads(answer.stdout)["outputs"] == {"y": [[3.0, 4.0]]}
    assert _open_sequences(server) == []


@pytest.mark.parametrize("shapes", [[(2, 2), (4, 1), (3, 3)], [(2, 2), (4, 1), (3, 3), (1, 4)]])
def test_a_failed_step_ends_the_sequence(server: ServedInThread, tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    np.save(tmp_path / "shape.npy", np.array(shapes, np.int64).reshape(-1))
    np.save(tmp_path / "numbers.npy", np.arange(4, dtype=np.float32))
    given = [f"--input={name}={tmp_path}/{name}.npy" for name in ("shape", "numbers")]
    answer = _run_sequence(server, "--model", "reshape", *given, "--json")
    assert answer.exit_code == 1
    assert len(answer.stdout.splitlines()) == 2
    assert f"step 3 of {len(shapes)} in sequence" in answer.stderr
    assert "may remain" not in answer.stderr
    assert _open_sequences(server, "reshape") == []


def _stream(server: ServedInThread, *options: str) -> CommandResult:
    url = server.rest if "REST" in options else f"grpc://{server.grpc}"
    options = tuple(option for option in options if option not in {"REST", "gRPC"})
    return run_command("stream", "--model", "words", *options, "--url", url)


@pytest.mark.parametrize(
    ("protocol", "given", "printed"),
    [
        ("gRPC", "once upon a time", "once upon a time"),
        ("REST", "once upon a time", "once upon a time"),
        # One output for each byte of UTF-8.
        ("gRPC", "letters", "h\u00e9\u2028\U0001f468\u200d\U0001f469"),
    ],
)
def test_text_is_printed_in_one_line(server: ServedInThread, protocol: str, given: str, printed: str) -> None:
    answer = _stream(server, "--input", given, protocol)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.rstrip() == printed


def test_replies_of_a_stream_are_lines_of_json_or_verbose_lines(server: ServedInThread) -> None:
    answer = _stream(server, "--input", "text=a b", "--timestamp", "7", "--json", "--parameter", "limit=2")
    assert [json.loads(line) for line in answer.stdout.splitlines()] == [
        {"timestamp": 7, "outputs": {"word": "a "}},
        {"timestamp": 8, "outputs": {"word": "b "}},
        {"timestamp": 9, "outputs": {"more": [0, 0]}},
    ]
    answer = _stream(server, "--input", "a b", "--timestamp", "3", "--verbose")
    assert [line.split() for line in answer.stdout.splitlines()[:2]] == [["3", "word", "a"], ["4", "word", "b"]]
    assert "first output after" in answer.stderr
    assert "3 outputs" in answer.stderr


def test_inputs_and_requests_of_a_stream_are_read_from_files(server: ServedInThread, tmp_path: Path) -> None:
    text, array = tmp_path / "prompt.txt", tmp_path / "text.npy"
    text.write_text("from a file")
    np.save(array, np.frombuffer(b"a b", np.uint8))
    for given, printed in ((str(text), "from a file"), (f"text=@{text}", "from a file"), (str(array), "a b")):
        assert _stream(server, "--input", given).stdout.rstrip() == printed
    missing = _stream(server, "--input", f"@{tmp_path / 'none'}")
    assert (missing.exit_code, "No such file" in missing.stderr) == (64, True)
    path = tmp_path / "requests.jsonl"
    path.write_text('{"inputs": {"text": "a"}, "timestamp": 1}\n\n{"inputs": {"text": "b c"}, "timestamp": 50}\n')
    answer = _stream(server, "--requests", str(path), "--json")
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    words = [(each["timestamp"], *each["outputs"].values()) for each in found if "word" in each["outputs"]]
    assert words == [(1, "a "), (50, "b "), (51, "c ")]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: expected a JSON object"),
        ('{"inputs": {"txt": "a"}}', "line 1: unknown: txt; the inputs are text"),
        ('{"inputs": {"text": [[1], [2, 3]]}}', "line 1: text"),
        ('{"inputs": {"text": [{}]}}', "line 1: text: expected a text, numbers or truth values"),
        ('{"inputs": {"text": "\\ud800"}}', "line 1: text"),
        ('{"inputs": ["text"]}', 'line 1: expected {"inputs"'),
        ('{"timestamp": "5"}', 'line 1: timestamp: expected an integer, got "5"'),
        ('{"timestamp": 9223372036854775808}', "line 1: timestamp: 9223372036854775808 is not a 64-bit integer"),
        ('{"parameters": {"x": 1.5}}', "line 1: parameters: expected an object"),
    ],
)
def test_a_wrong_line_of_requests_is_reported(server: ServedInThread, tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    answer = _stream(server, "--requests", str(path))
    assert (answer.exit_code, text in answer.stderr) == (1, True), answer.stderr


@both_protocols
@pytest.mark.parametrize(("given", "printed"), [("fail", ""), ("late", "so far\n")])
def test_a_failed_node_is_reported_after_its_outputs(
    server: ServedInThread, protocol: str, given: str, printed: str
) -> None:
    answer = _stream(server, "--input", given, protocol)
    assert (answer.exit_code, answer.stdout) == (1, printed)
    assert answer.stderr.count("ValueError: as asked (handler.py:") == 1
    if protocol == "gRPC":
        assert "gRPC status INVALID_ARGUMENT" in answer.stderr


def _profile(server: ServedInThread, *options: str) -> CommandResult:
    return run_command("profile", "--url", server.rest, "--seconds", "0.2", *options)


def test_a_profile_is_printed_in_every_form_and_written_for_speedscope(server: ServedInThread, tmp_path: Path) -> None:
    done = _profile(server, "--model", "dummy", "--speedscope", str(tmp_path / "p.json"))
    assert done.exit_code == 0, done.stderr
    assert "event loop" in done.stdout
    assert "Add" in done.stdout
    document = json.loads((tmp_path / "p.json").read_text())
    check_speedscope(document)
    assert {"event loop", "layers of dummy"} <= {each["name"] for each in document["profiles"]}
    printed = json.loads(_profile(server, "--no-layers", "--json").stdout)
    assert (printed["models"], printed["seconds"] >= 0.2) == ([], True)
    lines = list(csv.reader(io.StringIO(_profile(server, "--model", "dummy", "--format", "csv").stdout)))
    assert lines[0] == ["where", "what", "place", "own_percent", "total_percent", "microseconds"]
    assert any(line[0] == "dummy" for line in lines)


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        (1, "infer --model unknown --input b.npy", "Model with requested name is not found"),
        (1, "infer --model unknown --input b.npy", "; the server has adder, counter_stream, "),
        (1, "infer --model dummy --input nowhere.npy", "No such file"),
        (1, "infer --model counter_stream --input nowhere.npy", "error: nowhere.npy: No such file or directory"),
        (2, "infer --model dummy --input b.npy --url {free}", "is the server running?"),
        (64, "infer --model dummy", "--input"),
        (64, "infer --model dummy --input b.npy --output answer.txt", "--output"),
        (64, "infer --input b.npy", "--model"),
        (64, "infer --model dummy --input b.npy --url 127.0.0.1:99999", "99999"),
        (64, "infer --model dummy --input b.npy --timeout inf", "--timeout"),
        (64, "infer --model dummy --input b.npy --scale 2", "--scale"),
        (64, "infer --model dummy --input b.npy --cert c.pem", "require each other"),
        (1, "sequence run --model unknown --input rows.npy", "Model with requested name is not found"),
        (1, "sequence run --model dummy --input ten.npy", '"dummy" is not stateful'),
        (1, "sequence run --model sum --input nowhere.npy", "nowhere.npy: No such file"),
        (1, "sequence run --model sum --input z=none.npy", 'unknown input "z"; the model takes x'),
        (1, "sequence run --model sum --input complex.npy", "expected FP32, got complex64"),
        (2, "sequence run --model sum --input rows.npy --url {free}", "is the server running?"),
        (
            64,
            "sequence run --model sum --input rows.npy --axis 2",
            "--axis 2 is out of range: the model takes x [1, 2]",
        ),
        (64, "sequence run --model sum --input rows.npy --output sums.txt", "a file ending in"),
        (64, "sequence run --model sum --input rows.npy --join 0", "--join requires --output FILE"),
        (64, "sequence run --model sum --input rows.npy --sequence-id 0", "--sequence-id"),
        (64, "sequence run --model sum --input rows.npy --chunk 0", "--chunk"),
        (1, "stream --model unknown --input a", "; the server has adder, counter_stream, "),
        (2, "stream --model words --input a --url {free}", "is the server running?"),
        (64, "stream --model words", "either an input or --requests"),
        (64, "stream --model words --requests - --timestamp 3", "need an input"),
        (64, "stream --model words --input x --parameter limit", "expected NAME=VALUE"),
        (64, "stream --model words --requests /no/such/file", "No such file"),
        (64, "stream --model words --input text=a --input text=b", "given twice"),
        (
            64,
            "stream --model words --input txt=a",
            'unknown input "txt"; the graph takes text; to send it as text',
        ),
        (64, f"stream --model words --input a --timestamp {2**63}", "not a 64-bit integer"),
        (64, f"stream --model words --input a --parameter x={2**63}", "not a 64-bit integer"),
        (1, "profile --seconds 0.2 --url {rest} --model nothing", "nothing"),
        (1, "profile --seconds 0.2 --url {rest} --speedscope /no/such/p.json", "No such file or directory"),
        (2, "profile --seconds 0.2 --url {free}", "is the server running?"),
        (1, "top --once --interval 0.1 --url {http} --stages dummy", "has no figures of a pipeline"),
        (64, "top --once --interval 0.1 --url {http} --sort weight", "expected one of servable, version, state"),
    ],
)
@pytest.mark.usefixtures("command_folder")
def test_a_failed_command_has_an_exit_code_and_a_reason(
    server: ServedInThread, code: int, line: str, reason: str
) -> None:
    """1 is a refusal, 2 an unreachable server, 64 a usage error."""
    np.save("b.npy", np.arange(10, dtype=np.float32))
    np.save("rows.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    np.save("complex.npy", np.zeros((1, 2), np.complex64))
    np.save("ten.npy", np.zeros((3, 10), np.float32))
    free = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = line.format(free=free, grpc=server.grpc, rest=server.rest, http=server.http).split()
    done = run_command(*arguments, *(() if "--url" in arguments else ("--url", server.grpc)))
    assert (done.exit_code, reason in done.stderr) == (code, True), done.stderr
