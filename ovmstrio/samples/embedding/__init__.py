"""Sample embedding: texts with similar meanings get similar vectors."""
