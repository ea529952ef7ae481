"""A handler: many models, of which the few that are in use are in memory."""
