"""``python -m ovms_cli`` is ``ovms``."""

from ovms_cli.main import main

main()
