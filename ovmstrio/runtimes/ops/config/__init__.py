"""The configuration of a pipeline: ``config.yml`` read into settings, every problem told at once with its line."""
