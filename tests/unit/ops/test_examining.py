from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.ops import Op
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config
from ovmstrio.runtimes.ops.examining import examine_pipeline
from ovmstrio.runtimes.ops.graph import OpGraph
from tests.support.ops import text_graph


async def _problems(tmp_path: Path, config: str, graph: OpGraph | None = None, *, load: bool = True) -> list[str]:
    file = tmp_path / "config.yml"
    file.write_text(f"rpc_port: 0\n{config}")
    found = await examine_pipeline(graph or text_graph("a<@", "b<a"), examine_pipeline_config(file), load=load)
    return [str(problem).replace(str(file), "F") for problem in found]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("  a: {batch_size: 4, auto_batching_timeout: 5}\n  b: {timeout: 10, retry: 2}\n", ""),
        ("  aa: {}", "F:3: op.aa: no Op of the pipeline is called 'aa'; did you mean 'a'?"),
        ("  xyz: {}", "F:3: op.xyz: no Op of the pipeline is called 'xyz'; its Ops are a, b"),
        (
            "  a:\n    batch_size: 2",
            (
                "F:4: op.a.batch_size: batches of Op a wait until they are full, or until no request moves any more; "
                "set auto_batching_timeout"
            ),
        ),
        (
            "  b:\n    auto_batching_timeout: 2",
            (
                "F:4: op.b.auto_batching_timeout: auto_batching_timeout of Op b has no effect with batches of 1; "
                "set batch_size"
            ),
        ),
        (
            "  b:\n    retry: 2",
            "F:4: op.b.retry: retry of Op b has no effect without a timeout, after which to try again; set timeout",
        ),
    ],
    ids=["no problem", "misspelt Op", "unknown Op", "batches without a time", "time without batches", "retry"],
)
async def test_settings_without_effect(tmp_path: Path, config: str, expected: str) -> None:
    assert "\n".join(await _problems(tmp_path, f"op:\n{config}")) == expected


class _Wrong(Op):
    def postprocess(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # type: ignore[override] # the mistake
        pass


async def test_ops_that_cannot_run_are_reported(tmp_path: Path) -> None:
    (hook,) = await _problems(tmp_path, "", text_graph("a<@", make=_Wrong))
    assert hook.startswith(f"{__file__}:{_Wrong.postprocess.__code__.co_firstlineno}: ")
    assert hook.endswith(
        "postprocess of Op a cannot be called (expected postprocess(self, input_dicts, fetch_data, data_id, log_id), "
        "whose numbers may be left out, found postprocess(self, a, b, c, d, e))"
    )

    def make(**arguments: Any) -> Op:
        return Op(**arguments, concurrency=0)

    texts = await _problems(tmp_path, "", text_graph("a<@", "b<a", make=make))
    assert [text.partition(" cannot")[0] for text in texts] == [
        "argument concurrency of Op a",
        "argument concurrency of Op b",
    ]


async def test_loops_with_first_arrivals_are_refused(tmp_path: Path) -> None:
    graph = text_graph("a<@", "b<a", "c<a b", "d<c", jumps={"c": "a"})
    (text,) = await _problems(tmp_path, "dag:\n  channel_recv_frist_arrive: true\n", graph)
    assert text.startswith("F:3: dag.channel_recv_frist_arrive: ")
