"""Run SuperGradients scripts with Slipstream: importing this package makes `import super_gradients` import Slipstream.

Start a script with `python -m slipstream.supergradients SCRIPT`, or import this package before `super_gradients`.
"""

from slipstream.supergradients.finder import install

__all__ = ["install"]

install()
