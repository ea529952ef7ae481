"""Small complete models with their clients."""
