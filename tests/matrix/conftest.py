"""The matrix starts its two processes as the tests of several processes do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "distributed"))
