"""Paddle Serving's package for applications: ``local_predict`` is ours, all else is the original's if it is installed.

The readers of the original are plain Python and work with any server; its ``local_predict`` needs Paddle.
"""

import sys
from pathlib import Path

_here = Path(__file__).parent
_copies = (Path(entry) / __name__ for entry in sys.path)
# Ours comes first, so that its modules win.
__path__ = [str(_here), *dict.fromkeys(str(each) for each in _copies if each.is_dir() and each != _here)]
