"""Sample search: semantic search for the passage that answers a question."""
