"""Read a pure Python style configuration with `mmengine` (MMEngine or Slipstream), and print its values as JSON."""

import json
import sys
from pathlib import Path

from mmengine.config import Config

FILES = {
    "base/schedule.py": (
        "from torch.optim import SGD\n"
        "from mmengine.optim import OptimWrapper\n"
        "optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.1, momentum=0.9))\n"
        "epochs = 12\n"
    ),
    "base/model.py": (
        "import torch.nn as nn\n"
        "channels = [2 ** i for i in range(3)]\n"
        "model = dict(type=nn.Sequential, act=dict(type=nn.ReLU, inplace=True), norm=dict(type=nn.BatchNorm2d),\n"
        "    widths=channels)\n"
    ),
    "child.py": (
        "from mmengine.config import read_base\n"
        "with read_base():\n"
        "    from .base.model import *\n"
        "    from .base.schedule import optim_wrapper, epochs as length\n"
        "from torch.optim import AdamW\n"
        "import torch\n"
        "import torch.nn.functional\n"
        "model.update(dict(act=dict(inplace=False), head=dict(type='Linear', out=channels[-1])))\n"
        "model.norm.eps = 1e-3\n"
        "optim_wrapper.merge(dict(optimizer=dict(_delete_=True, type=AdamW, lr=0.001)))\n"
        "train_cfg = dict(max_epochs=length, dtype=torch.float16, hooks=[dict(type=AdamW)])\n"
        "for i in range(2):\n"
        "    train_cfg[f'step{i}'] = i\n"
    ),
    "external/base.py": "model = dict(type='A', inner=dict(type='B', k=1))\nloaders = [dict(type='C'), dict(x=1)]\n",
}


def write(folder):
    for name, text in FILES.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def read(folder):
    cfg = Config.fromfile(str(Path(folder, "child.py")))
    built = [cfg.optim_wrapper.optimizer.type, cfg.model.norm["type"], cfg.train_cfg.dtype]
    cfg.merge_from_dict({"model.act.inplace": True, "train_cfg.hooks.0.k": 3})
    dumped = str(Path(folder, "dumped.py"))
    cfg.dump(dumped)
    return {
        "values": cfg.to_dict(),
        "keys": sorted(cfg.to_dict(keep_imported=True)),
        "built": [str(item) for item in built],
        "dumped": Config.fromfile(dumped).to_dict(),
        "diff": [line for line in Config.diff(cfg, cfg).split("\n") if line.startswith(("+", "-"))],
    }


if __name__ == "__main__":
    write(sys.argv[1])
    print("RESULT " + json.dumps(read(sys.argv[1])))
