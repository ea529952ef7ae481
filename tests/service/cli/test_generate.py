"""``ovms generate`` with a wheel, which pip builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.project_files import write

BACKEND = """
import pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "ovmstrio-7.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        wheel.writestr("ovmstrio-7.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: ovmstrio\\nVersion: 7.0\\n")
        wheel.writestr("ovmstrio-7.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("ovmstrio-7.0.dist-info/RECORD", "")
    return name
"""
BUILD_SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "made_here"\nbackend-path = ["."]\n'


@pytest.mark.usefixtures("command_folder")
def test_a_wheel_of_sources_is_copied_into_the_image(tmp_path: Path) -> None:
    """It is built beside the Dockerfile; the image needs no index for the server."""
    write(Path("iris"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "made_here.py").write_text(BACKEND)
    (sources / "pyproject.toml").write_text(BUILD_SYSTEM)
    result = run_command("generate", "iris", "--from-source", str(sources))
    assert result.exit_code == 0, result.output
    assert Path("ovmstrio-7.0-py3-none-any.whl").is_file()
    text = Path("nucleus.Dockerfile").read_text()
    assert 'COPY ["ovmstrio-7.0-py3-none-any.whl", "/src/ovmstrio/ovmstrio-7.0-py3-none-any.whl"]' in text
    assert "RUN pip install --no-cache-dir '/src/ovmstrio/ovmstrio-7.0-py3-none-any.whl[handlers]'" in text
