"""Clients with which Ops call models: local models, KServe servers and model folders."""
