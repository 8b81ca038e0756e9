"""Add tests/distributed to the path, because the matrix uses its helpers to start two processes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "distributed"))
