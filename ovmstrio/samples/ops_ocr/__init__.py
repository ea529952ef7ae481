"""Sample ops_ocr: text recognition in pictures with a pipeline of Ops."""
