"""Run OpenMMLab libraries on Slipstream: importing this package makes `import mmengine` import Slipstream.

Import this package before any library that imports MMEngine, or start a script with
`python -m slipstream.openmmlab SCRIPT`.
"""

from slipstream.openmmlab.finder import install

__all__ = ["install"]

install()
