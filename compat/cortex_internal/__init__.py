"""What handlers written for Nucleus import from its server, by the names that they know."""
