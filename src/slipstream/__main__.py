"""`python -m slipstream` is the command `slipstream`."""

import sys

from slipstream.cli.main import main

sys.exit(main())
