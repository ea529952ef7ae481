"""``python -m ovmstrio.cli`` is ``ovms``."""

from ovmstrio.cli.entry import main

main()
