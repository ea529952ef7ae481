"""Sample ocr: text recognition in pictures with three models."""
