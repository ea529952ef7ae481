"""What is measured against what; ``just bench`` runs all of it and writes RESULTS.md."""
