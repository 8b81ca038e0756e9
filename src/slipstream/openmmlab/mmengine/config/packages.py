"""Package names of the OpenMMLab libraries."""

from types import MappingProxyType

__all__ = ["MODULE2PACKAGE"]

_OTHER_NAMES = {"mmseg": "mmsegmentation", "mmaction": "mmaction2"}
_MODULES = (
    "mmcls",
    "mmdet",
    "mmdet3d",
    "mmseg",
    "mmaction",
    "mmtrack",
    "mmpose",
    "mmedit",
    "mmocr",
    "mmgen",
    "mmfewshot",
    "mmrazor",
    "mmflow",
    "mmhuman3d",
    "mmrotate",
    "mmselfsup",
    "mmyolo",
    "mmpretrain",
    "mmagic",
)

MODULE2PACKAGE = MappingProxyType({name: _OTHER_NAMES.get(name, name) for name in _MODULES})
"""Maps each module to the name of its package for `pip install`."""
