"""Models of `make zoo`, whose libraries need no other build of torch, train like plain loops."""

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import zoo
from torchvision_operators import import_timm
from zoo_models import MODELS

TIMM = [f"timm {name}" for name in ("resnet18", "vit_tiny", "convnext_atto")]
ONE_GRAPH = ("BERT", "RoBERTa", "GPT-2", "Llama, activation_checkpointing", "Qwen2", "ViT")
OTHER = ("DeBERTa V2", "T5, activation_checkpointing")
NAMES = [f"transformers {name}" for name in (*ONE_GRAPH, *OTHER)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    logging.getLogger("slipstream").setLevel(logging.ERROR)
    yield
    logging.getLogger("slipstream").setLevel(logging.NOTSET)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*NAMES, *TIMM, "torch_geometric GCN", "torch_geometric GAT"])
def test_model_trains_like_a_plain_loop(name):
    import_timm() if name in TIMM else pytest.importorskip(MODELS[name].library)
    eager, compiled = zoo.check(name, False, False), zoo.check(name, True, False)
    assert eager["loss"] == eager["weights"] == 0
    assert eager["random"]
    assert compiled["random"]
    assert max(compiled["loss"], compiled["weights"]) < 1e-5
    assert zoo.kind(compiled) == "one graph" or not (
        name in TIMM or name.removeprefix("transformers ") in ONE_GRAPH
    )
