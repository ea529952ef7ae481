"""Find the passage of a text that answers a question, by what it means."""
