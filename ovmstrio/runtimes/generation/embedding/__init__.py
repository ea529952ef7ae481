"""Models that make vectors and scores of texts, which OpenVINO runs as it runs any model.

::

    texts ─> TextTokens (tokenizer, an OpenVINO model) ─> rows of tokens ─> RowEncoder (batches of all clients) ─> rows
"""
