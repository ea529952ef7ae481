"""Custom nodes in C around a model, with demultiplexing and gathering."""
