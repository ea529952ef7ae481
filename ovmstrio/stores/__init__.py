"""Stores of model files: object stores, model hubs and web servers, and their local copies."""
