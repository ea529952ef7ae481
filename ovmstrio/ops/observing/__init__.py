"""Observation of Ops: metrics, profiles, log files and hooks of user code."""
