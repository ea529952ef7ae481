"""Faces and their landmarks in a picture."""
