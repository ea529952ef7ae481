"""Workers that are processes of their own, so that a crash costs the requests in it and not the server."""
