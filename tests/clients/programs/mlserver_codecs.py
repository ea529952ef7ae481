"""A request that MLServer's codecs write and an answer that they read."""

from __future__ import annotations

import httpx
import numpy as np
from arguments import REST
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

X = np.arange(10, dtype=np.float32).reshape(1, 10)

body = InferenceRequest(inputs=[NumpyCodec.encode_input("b", X)]).model_dump_json(exclude_none=True)
answer = httpx.post(f"http://{REST}/v2/models/dummy/infer", content=body, trust_env=False, timeout=60)
(output,) = InferenceResponse.model_validate_json(answer.content).outputs
assert (np.ravel(NumpyCodec.decode_output(output)) == np.ravel(X + 1)).all()
