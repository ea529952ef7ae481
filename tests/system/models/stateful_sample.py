"""A client of a stateful model, written as TensorFlow's users write it; runs on its own.

Needs the packages tensorflow and tensorflow-serving-api and nothing of this project, so that another interpreter can
run it.  Prints the sums and the ids that came back, as JSON.
"""

from __future__ import annotations

import json
import sys

import grpc
from tensorflow import expand_dims, make_ndarray, make_tensor_proto
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

SEQUENCE_START = 1
SEQUENCE_END = 2


def main(address: str, model: str) -> None:
    """Run a sequence with an id of the client's, and one with an id of the server's, and ask about the model."""
    channel = grpc.insecure_channel(address)
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def infer(value: float, **special: tuple[int, str]) -> tuple[float, int]:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = model
        request.inputs["x"].CopyFrom(make_tensor_proto(expand_dims([value, value], axis=0), dtype="float32"))
        for name, (number, dtype) in special.items():
            request.inputs[name].CopyFrom(make_tensor_proto([number], dtype=dtype))
        response = stub.Predict(request, 10.0)
        sequence_id = response.outputs["sequence_id"].uint64_val[0]
        return float(make_ndarray(response.outputs["y"])[0, 0]), int(sequence_id)

    start, end = (SEQUENCE_START, "uint32"), (SEQUENCE_END, "uint32")
    own = (10, "uint64")
    steps = [
        infer(1.0, sequence_control_input=start, sequence_id=own),
        infer(2.0, sequence_id=own),
        infer(0.0, sequence_control_input=end, sequence_id=own),
        infer(5.0, sequence_control_input=start),
    ]
    servers = (steps[-1][1], "uint64")
    steps += [infer(0.5, sequence_id=servers), infer(1.0, sequence_control_input=end, sequence_id=servers)]

    question = get_model_metadata_pb2.GetModelMetadataRequest()
    question.model_spec.name = model
    question.metadata_field.append("signature_def")
    answer = stub.GetModelMetadata(question, 10.0)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(signatures)
    inputs = sorted(signatures.signature_def["serving_default"].inputs)

    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = model
    states = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, 10.0).model_version_status
    found = {"steps": steps, "inputs": inputs, "states": [[each.version, each.state] for each in states]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
