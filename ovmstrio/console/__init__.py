"""The web console: its page, its data and its live updates."""
