"""Threads for blocking code of users."""
