"""Sample error_output: a node that answers with a result or an error message."""
