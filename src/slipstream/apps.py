"""The former package of `slipstream.zoo`: `slipstream.apps.zoo` and `slipstream.apps.street_scenes` are aliases."""

import sys
from importlib import import_module
from pkgutil import iter_modules

from slipstream import zoo
from slipstream.zoo import street_scenes

__all__ = ["street_scenes", "zoo"]

sys.modules[f"{__name__}.zoo"] = zoo
sys.modules[f"{__name__}.street_scenes"] = street_scenes
for _module in iter_modules(zoo.__path__):
    sys.modules[f"{__name__}.zoo.{_module.name}"] = import_module(f"{zoo.__name__}.{_module.name}")
