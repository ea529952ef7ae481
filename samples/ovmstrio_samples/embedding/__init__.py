"""Sentence embedding: texts that mean alike get vectors that point alike."""
