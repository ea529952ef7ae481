"""Graphs that answer chats: requests for texts become packets, and packets pieces of text."""
