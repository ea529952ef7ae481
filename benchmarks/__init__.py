"""Benchmarks; ``just bench`` runs them and writes RESULTS.md."""
