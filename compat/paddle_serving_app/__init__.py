"""Paddle Serving's package for applications: ``local_predict`` and ``reader`` are ours, all else the original's.

What we have not is found in the original package if that is installed.
"""

import sys
from pathlib import Path

_here = Path(__file__).parent
_copies = (Path(entry) / __name__ for entry in sys.path)
# Ours comes first, so that its modules win.
__path__ = [str(_here), *dict.fromkeys(str(each) for each in _copies if each.is_dir() and each != _here)]
