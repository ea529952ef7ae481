"""OpenVINO models as servables, and the one validation of requests."""
