"""Utilities that know nothing of models and protocols."""
