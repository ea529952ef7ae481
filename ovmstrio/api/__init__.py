"""The protocols by which servables are reached."""
