"""OpenVINO models as servables."""
