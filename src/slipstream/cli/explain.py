"""`slipstream explain`: show a run's options, their sources, and the options this machine does not support."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slipstream.cli.configure import configure
from slipstream.cli.tables import print_table

if TYPE_CHECKING:
    from torch import nn

    from slipstream.config import Config
    from slipstream.speed import Capabilities

_MACHINE_BOUND = (("precision", "fp8"), ("precision", "tf32"), ("cuda_graph", True), ("cudnn_benchmark", True),
                  ("expandable_segments", True), ("prefetch", 2))  # fmt: skip
_HEADER = ("option", "value", "from", "why")


def run(args: argparse.Namespace) -> int:
    """Print the speed plan as a table, then the options that are off and those that this machine does not support."""
    from slipstream.registry import default_scope
    from slipstream.runner.builders import capabilities_of, read_plan
    from slipstream.speed.plan import option_rows

    cfg = configure(args)
    plan = read_plan(cfg, cfg)
    deterministic = (cfg.get("randomness") or {}).get("deterministic", False)
    with default_scope(cfg.get("default_scope", "slipstream")):
        capabilities = capabilities_of(_model(cfg), cfg.get("optim_wrapper"), deterministic)
    plan = plan.complete(capabilities)
    rows = list(option_rows(plan))
    listed = {**plan.sources, **plan.notes}
    off = [option for option in plan.options() if option not in listed]
    device, limits = str(capabilities.device), dict(_limits(capabilities))
    if args.json:
        options = [dict(zip(_HEADER, row, strict=True)) for row in rows]
        print(json.dumps({"options": options, "off": off, "device": device, "limits": limits}))
        return 0
    print_table(_HEADER, rows, 110)
    print("Off: " + ", ".join(off))
    if limits:
        print(f"No effect or not supported on this machine ({device}):")
        print(*(f"  {word}: {why}" for word, why in limits.items()), sep="\n")
    return 0


def _model(cfg: Config) -> nn.Module:
    """Return the model on the meta device, or on the CPU if it cannot be built there."""
    import torch

    from slipstream.errors import SlipstreamError
    from slipstream.runner.builders import build_model

    parts = cfg.model, cfg.get("data_preprocessor"), cfg.get("loss_fn")
    try:
        with torch.device("meta"):
            return build_model(*parts)
    except SlipstreamError:
        return build_model(*parts)


def _limits(capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    """Yield each option that has no effect or is not supported on this machine, with the reason."""
    from slipstream.speed import SpeedPlan
    from slipstream.speed.plan import rules

    for option, value in _MACHINE_BOUND:
        plan = SpeedPlan.read({"compile": True, option: value})
        refused, without_effect = rules(plan, capabilities)
        own = (rule.message for rule in (*refused, *without_effect) if rule.applies and rule.option == option)
        if message := next(own, None):
            yield f"{option}={value}", message
