"""PythonExecutorCalculator: nodes that run user code."""
