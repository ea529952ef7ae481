"""Sample file_type: detects 214 kinds of files by their first and last 1,024 bytes."""
