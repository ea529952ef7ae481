"""Downloads of models that OVMS's options ``--source-model`` and ``--pull`` name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ovmstrio.cli.console import fail, print_message
from ovmstrio.cli.progress import progress_bars

if TYPE_CHECKING:
    from ovmstrio.server.command_line import Download, SourceModels


def pull_models(models: SourceModels) -> None:
    """Download models, and exit after ``--pull``: with 0, or with 1 if a download failed."""
    for download in models.downloads:
        if download.folder is not None or models.is_pull:
            _pull(download)
    if models.is_pull:
        if not models.downloads:
            print_message("the model is already there; --overwrite-models downloads it again")
        raise typer.Exit


def _pull(download: Download) -> None:
    import trio

    from ovmstrio.core.errors import ServerError
    from ovmstrio.serving.mirrors import update_mirror
    from ovmstrio.stores.mirror import Mirror
    from ovmstrio.util.interrupts import run_interruptible

    mirror = Mirror(download.address)

    async def run() -> None:
        with progress_bars() as progress:
            await update_mirror(mirror, progress=progress)
            if download.folder is not None:
                await trio.to_thread.run_sync(mirror.export, download.folder)

    try:
        run_interruptible(run)
    except ServerError as error:
        fail(error.message)
    print_message(f"{download.address} is in {download.folder or download.address.path}", style="")
