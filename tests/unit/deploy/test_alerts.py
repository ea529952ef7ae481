from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import yaml

from ovmstrio.core import errors
from ovmstrio.transport.statuses import ERROR_STATUSES

ALERTS: Final = Path(__file__).parents[3] / "deploy" / "grafana" / "alerts.yml"
# Errors with a status of 400 to 499 that are no fault of the caller.
OF_THE_SERVER: Final = {errors.Overloaded, errors.QueueTimeExceeded, errors.VersionLoading, errors.GraphFailure}


def test_errors_of_callers_are_no_failures_in_alerts() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (rule,) = (each for each in rules if each["alert"] == "OvmstrioFailures")
    (excused,) = re.findall(r'code!~"([^"]+)"', rule["expr"])
    of_callers = {each for each, status in ERROR_STATUSES.items() if 400 <= status.http < 500} - OF_THE_SERVER
    codes = {each.__name__ for each in ERROR_STATUSES} | {"OK", "Cancelled", "404", "422", "500", "503"}

    found = {code for code in codes if re.fullmatch(excused, code)}

    assert found == {each.__name__ for each in of_callers} | {"OK", "Cancelled", "404", "422"}
