"""Paddle Serving's application package: ``local_predict`` and ``reader``.

Other modules are found in the original package, if installed.
"""

import sys
from pathlib import Path

_here = Path(__file__).parent
_copies = (Path(entry) / __name__ for entry in sys.path)
# This folder comes first, so that its modules take precedence.
__path__ = [str(_here), *dict.fromkeys(str(each) for each in _copies if each.is_dir() and each != _here)]
