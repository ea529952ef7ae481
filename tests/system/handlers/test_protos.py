from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.handlers.grpc.proto_compiler import open_proto
from tests.support.projects import FOUR_KINDS, PRIMES, written


async def test_services_have_their_message_classes(tmp_path: Path) -> None:
    source = written(tmp_path, "kinds.proto", FOUR_KINDS.format(package="given"))
    async with open_proto(source, tmp_path) as proto:
        (service,) = proto.services
        assert service.name == "given.Kinds"
        assert {rpc.path: (rpc.client_streaming, rpc.server_streaming) for rpc in service.rpcs} == {
            "/given.Kinds/Alpha": (False, False),
            "/given.Kinds/Beta": (True, False),
            "/given.Kinds/Gamma": (False, True),
            "/given.Kinds/Delta": (True, True),
        }
        alpha = service.rpcs[0]
        assert alpha.request_class is alpha.reply_class is proto.module.Sample
        assert proto.module.Sample.FromString(proto.module.Sample(text="x").SerializeToString()).text == "x"


async def test_generated_code_is_removed(tmp_path: Path) -> None:
    source = written(tmp_path, "primes.proto", PRIMES)
    before = set(sys.modules)
    async with open_proto(source, tmp_path) as proto:
        folder = Path(str(proto.module.__file__)).parent
        assert folder.exists()
        assert folder != tmp_path
    assert not folder.exists()
    assert list(await trio.Path(tmp_path).iterdir()) == [trio.Path(source)]
    assert not [name for name in set(sys.modules) - before if "primes" in name]


async def test_dashes_of_a_file_name_become_underscores(tmp_path: Path) -> None:
    source = written(tmp_path, "prime-numbers.proto", PRIMES)
    async with open_proto(source, tmp_path) as proto:
        assert set(proto.modules) == {"prime_numbers_pb2", "prime_numbers_pb2_grpc"}
        assert proto.modules["prime_numbers_pb2"] is proto.module
        assert hasattr(proto.modules["prime_numbers_pb2_grpc"], "GeneratorStub")


async def test_files_of_the_project_can_be_imported(tmp_path: Path) -> None:
    written(
        tmp_path, "protos/common.proto", 'syntax = "proto3"; package nested.common; message Box { int32 size = 1; }'
    )
    text = """
        syntax = "proto3";
        package nested;
        import "protos/common.proto";
        import "google/protobuf/timestamp.proto";
        service Boxes { rpc Pack (common.Box) returns (Packed); }
        message Packed { common.Box box = 1; google.protobuf.Timestamp at = 2; }
    """
    source = written(tmp_path, "protos/boxes.proto", text)
    async with open_proto(source, tmp_path) as proto:
        assert proto.modules["boxes_pb2"] is proto.modules["protos.boxes_pb2"] is proto.module
        box = proto.modules["protos.common_pb2"].Box(size=3)
        assert proto.module.Packed(box=box).box.size == 3
        assert list(proto.files) == [
            "protos/common.proto",
            "google/protobuf/timestamp.proto",
            "protos/boxes.proto",
        ]


async def test_two_projects_may_have_files_and_messages_of_one_name(tmp_path: Path) -> None:
    text = """
        syntax = "proto3";
        package twice;
        import "google/protobuf/timestamp.proto";
        service Echo {{ rpc Say (Word) returns (Word); }}
        message Word {{ {fields} google.protobuf.Timestamp at = 9; }}
    """
    first = written(tmp_path, "one/echo.proto", text.format(fields="string text = 1;"))
    second = written(tmp_path, "two/echo.proto", text.format(fields="int32 number = 1;"))
    async with open_proto(first, first.parent) as one, open_proto(second, second.parent) as two:
        assert [field.name for field in one.module.Word.DESCRIPTOR.fields] == ["text", "at"]
        assert [field.name for field in two.module.Word.DESCRIPTOR.fields] == ["number", "at"]
        word = two.module.Word(number=4)
        word.at.FromSeconds(60)
        assert two.services[0].rpcs[0].request_class.FromString(word.SerializeToString()).at.ToSeconds() == 60
        assert one.modules["echo_pb2_grpc"] is not two.modules["echo_pb2_grpc"]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            'syntax = "proto3";\nmessage A { strin a = 1; }\nmessage B { int b = 1; }\n',
            [(2, '"strin" is not defined.'), (3, '"int" is not defined.')],
        ),
        ('syntax = "proto3"; package empty; message A {}', [(None, "declares no service")]),
    ],
    ids=["errors of the compiler", "no service"],
)
async def test_problems_of_a_file_are_reported(
    tmp_path: Path, text: str, problems: list[tuple[int | None, str]]
) -> None:
    source = written(tmp_path, "bad.proto", text)
    with pytest.raises(ConfigError) as caught:
        async with open_proto(source, tmp_path):
            pass
    assert [(problem.line, problem.message) for problem in caught.value.problems] == problems
    assert {problem.file for problem in caught.value.problems} == {str(source)}


async def test_missing_files_are_named(tmp_path: Path) -> None:
    source = written(tmp_path, "lonely.proto", 'syntax = "proto3";\nimport "friend.proto";\n')
    with pytest.raises(ConfigError, match=r"friend\.proto"):
        async with open_proto(source, tmp_path):
            pass
    with pytest.raises(ConfigError, match=r"none\.proto: protobuf_path: the protobuf file does not exist"):
        async with open_proto(tmp_path / "none.proto", tmp_path):
            pass


async def test_a_missing_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[handlers\]"):
        async with open_proto(written(tmp_path, "primes.proto", PRIMES), tmp_path):
            pass


async def test_methods_of_one_name_in_two_services_are_refused(tmp_path: Path) -> None:
    text = """
        syntax = "proto3";
        package clash;
        service One { rpc A (M) returns (M); rpc B (M) returns (M); }
        service Two { rpc A (M) returns (M); rpc B (M) returns (M); rpc C (M) returns (M); }
        message M {}
    """
    with pytest.raises(ConfigError) as caught:
        async with open_proto(written(tmp_path, "clash.proto", text), tmp_path):
            pass
    assert [problem.message for problem in caught.value.problems] == [
        f"clash.One and clash.Two both have a method {name}, but a Handler can have only one" for name in "AB"
    ]


async def test_modules_of_the_working_directory_are_not_imported_by_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("types.py", "grpc_tools.py"):
        written(tmp_path, name, "raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    async with open_proto(written(tmp_path, "primes.proto", PRIMES), tmp_path) as proto:
        assert proto.services[0].name == "prime_generator.Generator"


async def test_warnings_of_the_compiler_are_logged(tmp_path: Path) -> None:
    written(tmp_path, "unused.proto", 'syntax = "proto3"; package unused;')
    text = 'syntax = "proto3";\nimport "unused.proto";\nservice S { rpc A (M) returns (M); }\nmessage M {}\n'
    source = written(tmp_path, "warned.proto", text)
    with capture_logs() as logs:
        async with open_proto(source, tmp_path):
            pass
    assert {each["problem"] for each in logs if each["log_level"] == "warning"} == {
        f"{source}:2: Import unused.proto is unused."
    }
