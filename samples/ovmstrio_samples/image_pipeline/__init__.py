"""A photograph through Python, OpenVINO and Python again."""
