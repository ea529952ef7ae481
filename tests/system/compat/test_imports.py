"""Imports of the compatible packages in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_OPENCV = """
import sys
sys.modules["cv2"] = None
from paddle_serving_app.reader import ChineseBertReader, LACReader, SentaReader
from paddle_serving_app.reader.imdb_reader import IMDBDataset
try:
    from paddle_serving_app.reader import Resize
except ModuleNotFoundError as error:
    print(error)
"""


def _python(code: str, folder: Path) -> str:
    """Run code with the path of this process; return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=folder, env=environment, timeout=60, capture_output=True, text=True)
    return done.stdout


def test_an_import_creates_no_files(tmp_path: Path) -> None:
    """A client that imports the package gets no folder for logs."""
    _python("import paddle_serving_server.pipeline", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_readers_of_text_need_no_opencv(tmp_path: Path) -> None:
    """Readers of images name the extra that installs it."""
    printed = _python(WITHOUT_OPENCV, tmp_path)
    assert "readers of images need OpenCV; install it: " in printed
    assert "[paddle]" in printed
