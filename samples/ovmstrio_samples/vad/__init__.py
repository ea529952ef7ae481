"""Is someone speaking: a model whose state the client carries from call to call."""
