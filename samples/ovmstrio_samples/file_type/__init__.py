"""What kind of file is this: 214 kinds, told from the first and last 1,024 bytes."""
