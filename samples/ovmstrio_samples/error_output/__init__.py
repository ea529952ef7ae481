"""A node that answers with a result or with what went wrong."""
