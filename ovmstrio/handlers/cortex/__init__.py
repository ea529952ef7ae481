"""API of Nucleus handlers, which user code imports as ``cortex_internal``."""
