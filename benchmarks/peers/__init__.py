"""Comparison with other servers on equal models, settings and load, each in a separate environment, in turn."""
