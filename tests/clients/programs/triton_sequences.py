"""Two sequences interleaved on a stream, with ids that are numbers and texts."""

from __future__ import annotations

import queue

import numpy as np
import tritonclient.grpc as triton
from arguments import GRPC

answers: queue.Queue[object] = queue.Queue()
with triton.InferenceServerClient(GRPC) as client:
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    for place, value in enumerate((1.0, 2.0, 3.0)):
        for identity in (1001, "a-text"):
            given = triton.InferInput("x", [1, 2], "FP32")
            given.set_data_from_numpy(np.full((1, 2), value, np.float32))
            client.async_stream_infer(
                "sums", [given], sequence_id=identity, sequence_start=place == 0, sequence_end=place == 2
            )
    found = [float(answers.get(timeout=60).as_numpy("y")[0, 0]) for _ in range(6)]
    client.stop_stream()
assert found == [1, 1, 3, 3, 6, 6], found
