"""The command line's part of a project's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ovmstrio.project_server.settings import ProjectSettings
from pydantic import ValidationError

FILE = Path("file.pem")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert": FILE}, "each needs the other"),
        ({"tls_key": FILE}, "each needs the other"),
        ({"client_ca": FILE}, "needs --tls_cert and --tls_key"),
        ({"port": 65_536}, "less than or equal to 65535"),
        ({"drain_seconds": -1}, "greater than or equal to 0"),
    ],
    ids=["cert", "key", "ca", "port", "drain"],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], problem: str) -> None:
    """Above all, nobody who asks for TLS is served without it."""
    with pytest.raises(ValidationError, match=problem):
        ProjectSettings.model_validate(given)


def test_tls_with_and_without_certificates_of_clients_is_fine() -> None:
    """Both files of it are there."""
    assert ProjectSettings(tls_cert=FILE, tls_key=FILE).client_ca is None
    assert ProjectSettings(tls_cert=FILE, tls_key=FILE, client_ca=FILE).client_ca == FILE
