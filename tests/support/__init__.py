"""Shared helpers of tests: models made by code, servers in processes and in threads."""
