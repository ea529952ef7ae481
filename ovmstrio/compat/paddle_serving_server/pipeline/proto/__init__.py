"""Messages and service of pipelines."""
