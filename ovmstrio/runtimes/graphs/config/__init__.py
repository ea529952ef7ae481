"""Graph files: protobuf text format, read and checked with every problem at its line."""
