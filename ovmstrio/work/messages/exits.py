"""How worker processes end that cannot say why: their exit statuses.  Older interpreters must be able to read this."""

from __future__ import annotations

__all__ = ["LOST_CHANNEL", "MEANINGS", "NO_NUMPY", "TOO_OLD"]

TOO_OLD = 81
NO_NUMPY = 82
LOST_CHANNEL = 83

MEANINGS = {
    TOO_OLD: "its interpreter is older than Python 3.10",
    NO_NUMPY: "its interpreter has no numpy, which pyovms needs: install it there with python -m pip install numpy",
    LOST_CHANNEL: "its code has closed the file through which it speaks with the server",
}
