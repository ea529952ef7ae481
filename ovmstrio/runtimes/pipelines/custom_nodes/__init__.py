"""Custom nodes: user code between the models of a pipeline, in C libraries or Python files."""
