"""How worker processes end that cannot say why: their exit statuses.  Older interpreters must be able to read this."""

from __future__ import annotations

__all__ = ["LOST_CHANNEL", "LOST_LOOP", "LOST_MODEL", "MEANINGS", "NO_NUMPY", "TOO_OLD", "UNREADABLE"]

TOO_OLD = 81
NO_NUMPY = 82
LOST_CHANNEL = 83
LOST_LOOP = 84
UNREADABLE = 85
LOST_MODEL = 86

MEANINGS = {
    TOO_OLD: "its interpreter is older than Python 3.10",
    NO_NUMPY: "its interpreter has no numpy, which pyovms needs: install it there with python -m pip install numpy",
    LOST_CHANNEL: "its code has closed the file through which it speaks with the server",
    LOST_LOOP: "the event loop of its async code has broken down",
    UNREADABLE: "it cannot take what the server sends: it may have no file descriptors or no memory left",
    LOST_MODEL: "the model failed and could not be loaded again",
}
