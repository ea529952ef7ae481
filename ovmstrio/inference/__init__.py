"""OpenVINO models: reading, compiling, running and tuning them; the only importer of ``openvino``."""
