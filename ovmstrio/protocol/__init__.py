"""Messages of the wire protocols."""
