"""Is someone speaking: a model that remembers what it heard, each sequence for itself."""
