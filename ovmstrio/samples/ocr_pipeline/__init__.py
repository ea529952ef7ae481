"""Sample ocr_pipeline: text recognition in a picture file with two models and three Python nodes."""
