"""Entry point of `python -m slipstream`, the same command as `slipstream`."""

import sys

from slipstream.cli.main import main

sys.exit(main())
