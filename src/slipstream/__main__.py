"""Entry point for `python -m slipstream`, which is equivalent to the `slipstream` command."""

import sys

from slipstream.cli.main import main

sys.exit(main())
