"""`python -m slipstream.train_from_kd_recipe --config-name=NAME`: SuperGradients' command for knowledge distillation.

This is the same command as `python -m slipstream.train_from_recipe`, which recognizes knowledge distillation recipes.
"""

from __future__ import annotations

import sys

from slipstream.train_from_recipe import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
