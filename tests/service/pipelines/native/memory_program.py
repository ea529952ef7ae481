"""Program that runs every returning mode of the fixture library, for a memory checker.

Arguments: the library; ``leak`` to forget to close a node at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.pipelines.native.node import open_native_node

CALLS: Final = ("echo", "write", "address", "return_input", "error", "null", "zero", "negative", "huge")
OUTPUTS: Final = ("g", "gzc", "ga", "za", "n", "p", "q", "s", "d", "m", "h", "r", "x", "i", "gngpgsgdgmghgrgxgi")
INFOS: Final = ("error", "null", "negative", "huge", "no_name", "no_shape")


def parameters() -> Iterator[dict[str, str]]:
    yield {"initialize": "error"}
    for mode in INFOS:
        yield {"inputs_info": mode}
        yield {"outputs_info": mode}
    for mode in CALLS:
        yield {"execute": mode}
    for letters in OUTPUTS:
        yield {"execute": "outputs", "outputs": letters}


async def one(library: Path, params: dict[str, str]) -> None:
    async with trio.open_nursery() as tasks:
        with suppress(ConfigError):
            node = await open_native_node(library, "n", params, tasks=tasks)
            try:
                async with trio.open_nursery() as nursery:
                    for _ in range(2):
                        nursery.start_soon(call, node.execute)
            finally:
                await node.aclose()


async def call(execute: object) -> None:
    """Make one call whose inputs are shared and one's own, and read all that comes back."""
    shared = np.arange(1000, dtype=np.float32)
    shared.flags.writeable = False
    with suppress(CustomNodeFailure):
        outputs = await execute({"x": shared, "a": np.ones((3, 3), np.int64)})  # type: ignore[operator]
        for array in outputs.values():
            array.tobytes()


async def everything(library: Path, *, leaks: bool) -> None:
    count = 0
    for params in parameters():
        await one(library, params)
        count += 1
    if leaks:
        async with trio.open_nursery() as tasks:
            node = await open_native_node(library, "n", {}, tasks=tasks)
            node._threads.close()  # noqa: SLF001 - the leak is on purpose
    print(f"{count} nodes were called")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    trio.run(partial(everything, Path(sys.argv[1]), leaks="leak" in sys.argv[2:]))
