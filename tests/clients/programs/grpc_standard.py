"""Health and reflection, as command line tools and load balancers ask for them."""

from __future__ import annotations

import grpc
from arguments import GRPC
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

with grpc.insecure_channel(GRPC) as channel:
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService"), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (listed,) = reflection.ServerReflectionInfo(iter([asked]), timeout=30)
    assert "inference.GRPCInferenceService" in {each.name for each in listed.list_services_response.service}
