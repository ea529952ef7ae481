"""Repeated reading of a page with the models and the code of the sample ``ops_ocr``, without a server.

Arguments: the service's folder, the number of threads, the seconds, and ``all`` for all of the service's code or
``models`` for the models only, with prepared inputs.  Prints pages per second.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openvino as ov

from benchmarks.rates import pages_a_second
from ovmstrio.inference.model_readers import read_paddle
from ovmstrio.ops.config_file import read_pipeline_config
from ovmstrio.ops.predictor.local_model import plugin_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__: list[str] = []


def _compile(op: str) -> ov.CompiledModel:
    """Compile the model of an Op with the service's settings."""
    settings = read_pipeline_config(yml_file="config.yml").op(op)
    conf = settings.local_service_conf
    model = read_paddle(Path(conf.model_config or ""))
    return ov.Core().compile_model(model, "CPU", plugin_config(conf, "CPU", settings.concurrency))


class _Reader:
    """Infer requests and Ops of one thread."""

    def __init__(self, models: Sequence[ov.CompiledModel]) -> None:
        from ovmstrio.samples.ops_ocr.client import PAGE  # noqa: PLC0415 - only this sample needs these packages
        from ovmstrio.samples.ops_ocr.web_service import DetOp, RecOp  # noqa: PLC0415 - only this sample needs these packages

        self._requests = [model.create_infer_request() for model in models]
        self._det, self._rec = DetOp(name="det"), RecOp(name="rec")
        self._rec.init_op()
        self._image = base64.b64encode(PAGE.read_bytes()).decode()
        self._feeds = self._det_feed(), self.read()

    def _infer(self, number: int, feed: Any) -> dict[str, Any]:
        (likely,) = self._requests[number].infer(feed["x"], share_inputs=True, share_outputs=True).values()
        return {"likely": likely}

    def _det_feed(self) -> Any:
        return self._det.preprocess({"request": {"image": self._image}})[0]

    def read(self) -> list[Any]:
        """Read a page from its file to its texts; return the feeds of its lines."""
        found = self._det.postprocess({}, self._infer(0, self._det_feed()))[0]
        feeds: list[Any] = self._rec.preprocess({"det": found})[0]
        # The next inference of the request overwrites its outputs.
        read = [{"likely": self._infer(1, feed)["likely"].copy()} for feed in feeds]
        self._rec.postprocess({"det": found}, read)
        return feeds

    def infer(self) -> None:
        """Run the models only."""
        page, lines = self._feeds
        self._infer(0, page)
        for feed in lines:
            self._infer(1, feed)


def _main(folder: str, threads: int, seconds: float, what: str) -> None:
    os.chdir(folder)
    models = [_compile(op) for op in ("det", "rec")]

    def make() -> Callable[[], object]:
        reader = _Reader(models)
        return reader.read if what == "all" else reader.infer

    print(pages_a_second(make, threads, seconds))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
