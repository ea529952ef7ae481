"""What a project's ``nucleus.yaml`` and ``.env`` say: read, checked as a whole, and given as one spec."""
