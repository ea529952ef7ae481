"""OpenVINO models as services: loading, request validation, batching and sequences."""
