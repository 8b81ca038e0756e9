"""Read damaged configuration files, compose recipes with random overrides, and report every unacceptable error.

An error is acceptable if it is a SlipstreamError that names the file, the recipe or a key.

Run `python tests/faults/fuzz_files.py --count 100000` with src/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.mutations import misspelled, summary
from slipstream.cli.configure import load_config
from slipstream.config import Config
from slipstream.errors import SlipstreamError

YAML = """\
_base_: base.yaml
model: &model {type: Classifier, network: {type: Linear, in_features: 4, out_features: 3}}
train_cfg:
  by_epoch: true
  max_epochs: 3  # a comment
optim_wrapper:
  optimizer: {type: SGD, lr: 1.0e-3, betas: [0.9, 0.99]}
custom_hooks:
  - type: EMAHook
    momentum: 0.01
twin: *model
text: "a \\"quoted\\" text"
seed: ${optim_wrapper.optimizer.lr}
folder: '{{ fileDirname }}/out'
"""
PYTHON = """\
_base_ = ["base.yaml"]
lr = 1e-3
model = dict(type="Classifier", network=dict(type="Linear", in_features=4, out_features=3))
train_cfg = dict(by_epoch=True, max_epochs=3)
optim_wrapper = dict(_delete_=True, optimizer=dict(type="SGD", lr=2 * lr, betas=(0.9, 0.99)))
custom_hooks = [dict(type="EMAHook", momentum=0.01) for _ in range(2)]
data_root = "{{ fileDirname }}/data"
train_cfg.update(val_interval=len(custom_hooks))
"""
JSON = '{"_base_": "base.yaml", "model": {"type": "A", "w": [1, 2.5, null]}, "train_cfg": {"by_epoch": true}}'
TOML = '_base_ = "base.yaml"\nlr = 1e-3\n[train_cfg]\nby_epoch = true\n[[custom_hooks]]\ntype = "EMAHook"\n'
BASE = "work_dir: out\noptim_wrapper: {optimizer: {type: SGD}, clip_grad: {max_norm: 3}}\n"

FILES = {"config.yaml": YAML, "config.py": PYTHON, "config.json": JSON, "config.toml": TOML}
SPLICES = (
    "{", "}", "[", "]", ":", ": ", ",", "'", '"', "\n", "  ", "\t", "#", "=", "(", ")", "*", "&a ", "*a", "<<: ",
    "---\n", "!!python/object:os.system x", "%", "\\", "\0", "\ufeff", "${", "${a.b}", "{{ x }}", "{{ $HOME }}",
    "_base_: ", "_base_ = 3\n", "_delete_: 1", "null", "1e999", ".nan", "- ", "? ", "| ", "> ", "é", "\ud83d", "0x",
    "1/0", "lambda: 0", "raise ", "import os\n", "del lr\n", "while 0: pass\n", "def f(): return f()\n", "**",
    "a.b=1", "=!", "`", "@",
)  # fmt: skip
RECIPES = ("cifar10_resnet", "street_scenes_pp_lite_t", "camvid_pp_lite_t", "cityscapes_regseg48")
VALUES = (
    "", "3", "-1", "abc", "[1,2]", "{a: 1}", "null", "true", "nan", "inf", "1e-3", "'", '"a', "[", "{", "${x}",
    "${lr}", "${oc.env:NO_SUCH}", "a=b", "a,b", "range(1,3)", "choice(1,2)", "glob(*)", "???", "é", "\\", "@x", "=",
    "!!python/name:os", "1" * 400, "[[[[", "*", "a: b", "_target_", "{_target_: os.getcwd}",
)  # fmt: skip


class Finding(NamedTuple):
    """An input that raised an unacceptable error."""

    kind: str
    given: str
    message: str
    where: str


def damaged(text: str, rng: random.Random) -> str:
    """Return `text` with up to three random edits."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        lines = text.splitlines(keepends=True) or [""]
        at, line = rng.randrange(len(text) + 1), rng.randrange(len(lines))
        kind = rng.choice(
            ["splice", "splice", "splice", "cut", "drop", "repeat", "indent", "end", "swap", "deep"]
        )
        if kind == "splice":
            text = text[:at] + rng.choice(SPLICES) + text[at + rng.choice([0, 0, 1, 5]) :]
        elif kind == "cut":
            text = text[:at] + text[at + rng.randrange(1, 20) :]
        elif kind == "end":
            text = text[:at]
        elif kind == "deep":
            text = text[:at] + rng.choice(["[", "{a: ", "(", "- "]) * rng.choice([3, 2000]) + text[at:]
        else:
            edited = {
                "drop": "",
                "repeat": lines[line] * 2,
                "indent": "  " + lines[line],
                "swap": lines[line - 1],
            }
            lines[line] = edited[kind]
            text = "".join(lines)
    return text


def override(keys: Sequence[str], rng: random.Random) -> str:
    """Return a random override of a recipe with these dotted keys."""
    key = rng.choice([*keys, "lr", "epochs", "a.b", "", "speed", "hydra", "defaults", "training_params.x"])
    kind = rng.choice(["set"] * 5 + ["typo", "add", "force", "delete", "bare", "item", "cut", "package"])
    value = rng.choice(VALUES)
    return {
        "set": f"{key}={value}",
        "typo": f"{misspelled(key, rng)}={value}",
        "add": f"+{key}={value}",
        "force": f"++{key}={value}",
        "delete": f"~{key}",
        "bare": key,
        "item": f"{key}[{rng.choice(['0', '-1', '99', 'a', ''])}]={value}",
        "cut": f"{key[: rng.randrange(len(key) + 1)]}={value}",
        "package": f"{key}@{rng.choice(['a', '', '_global_'])}={value}",
    }[kind]


def read_damaged_file(seed: int) -> Finding | None:
    """Read a damaged file. Every error must name the file."""
    rng = random.Random(seed)
    name = rng.choice(list(FILES))
    with tempfile.TemporaryDirectory() as folder:
        text = damaged(FILES[name], rng)
        base = damaged(BASE, rng) if rng.random() < 0.1 else BASE
        for file, content in ((name, text), ("base.yaml", base)):
            Path(folder, file).write_bytes(content.encode("utf-8", "surrogatepass"))
        return _tried(lambda: Config.fromfile(Path(folder, name)), text, [name, "base.yaml"])


def compose_with_overrides(seed: int) -> Finding | None:
    """Compose a recipe with random overrides. Every error must name the recipe or a key."""
    rng = random.Random(seed)
    recipe = rng.choice(RECIPES)
    if recipe not in _KEYS:
        _KEYS[recipe] = [*_dotted(load_config(recipe).cfg.to_dict()), *_SUPERGRADIENTS_KEYS]
    given = [override(_KEYS[recipe], rng) for _ in range(rng.choice([1, 1, 2]))]
    keys = [text.partition("=")[0] for text in given]
    words = [word for key in keys for word in (key, *re.split(r"[=.\[\]@+~]", key)) if word]
    return _tried(lambda: load_config(recipe, given), f"{recipe} {given}", [recipe, *words, *given])


_KEYS: dict[str, list[str]] = {}
_SUPERGRADIENTS_KEYS = (
    *(f"training_hyperparams.{key}" for key in ("initial_lr", "max_epochs", "optimizer_params.momentum", "lr_mode",
                                                "ema_params.decay", "phase_callbacks", "loss", "speed",
                                                "mixed_precision")),
    "dataset_params.train_dataloader_params.batch_size", "dataset_params.train_dataset_params.transforms",
    "arch_params.num_classes", "checkpoint_params.pretrained_weights", "num_gpus", "multi_gpu", "architecture",
)  # fmt: skip


def _dotted(value: object, path: str = "") -> list[str]:
    items = value.items() if isinstance(value, dict) else ()
    found = [f"{path}.{key}".lstrip(".") for key, _ in items]
    return [*found, *(inner for key, item in items for inner in _dotted(item, f"{path}.{key}".lstrip(".")))]


def _tried(read: Callable[[], object], given: str, names: Sequence[str]) -> Finding | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except SlipstreamError as error:
        if any(name in str(error) for name in names):
            return None
        return Finding("names nothing", given, f"{type(error).__name__}: {error}"[:300], _origin(error))
    except BaseException as error:
        return Finding("foreign", given, f"{type(error).__name__}: {error}"[:300], _origin(error))
    return None


def _origin(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/slipstream/" in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} at {last.filename.rpartition('/slipstream/')[2]}:{last.lineno} {last.name}"
    )


KINDS: dict[str, Callable[[int], Finding | None]] = {
    "files": read_damaged_file,
    "recipes": compose_with_overrides,
}


def _one(kind: str, seed: int) -> Finding | None:
    return KINDS[kind](seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, action="append")
    args = parser.parse_args()
    found: list[Finding] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for kind in args.kind or KINDS:
            seeds = range(args.seed, args.seed + args.count)
            found += filter(None, pool.imap_unordered(partial(_one, kind), seeds, chunksize=20))
    for (kind, where), count in Counter((f.kind, f.where) for f in found).most_common():
        print(f"\n{count} x {kind}: {where}")
        for finding in [f for f in found if (f.kind, f.where) == (kind, where)][:3]:
            print(f"    {finding.given!r:.400}\n        {finding.message}")
    print(summary("fuzz_files", args.count * len(args.kind or KINDS), len(found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
