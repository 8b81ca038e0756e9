"""The matrix starts its two processes in the same way as tests/distributed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "distributed"))
