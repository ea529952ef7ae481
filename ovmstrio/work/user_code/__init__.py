"""What every part of the server that runs Python code of users has in common."""
