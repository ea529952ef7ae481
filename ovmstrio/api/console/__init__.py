"""The console: a page that shows what the server does, and the endpoints that it lives on."""
