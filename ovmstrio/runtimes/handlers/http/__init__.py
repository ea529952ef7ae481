"""What HTTP requests are to handlers, and what handlers' results are to HTTP; no front end is known here."""
