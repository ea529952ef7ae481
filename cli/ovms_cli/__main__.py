"""``python -m ovms_cli`` is ``ovms``."""

from ovms_cli.entry import main

main()
