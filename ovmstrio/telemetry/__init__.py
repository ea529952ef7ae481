"""Metrics, logs, traces, profiles and recent history."""
