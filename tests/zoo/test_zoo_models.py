from __future__ import annotations

import pytest
import torch

from slipstream.errors import CheckpointError, ConfigError, UnknownNameError
from slipstream.zoo import (
    models,
    pp_lite_t_seg,
    regseg48,
    stdc1_seg,
)
from slipstream.zoo.ddrnet import ddrnet_23_slim

PROMISED = [
    *(
        "pp_lite_t_seg",
        "pp_lite_t_seg50",
        "pp_lite_t_seg75",
        "pp_lite_b_seg",
        "pp_lite_b_seg50",
        "pp_lite_b_seg75",
    ),
    *("stdc1_seg", "stdc1_seg50", "stdc1_seg75", "stdc2_seg", "stdc2_seg50", "stdc2_seg75"),
    *("regseg48", "ddrnet_23", "ddrnet_23_slim", "ddrnet_39"),
    *("resnet18", "resnet18_cifar", "resnet34", "resnet50", "shelfnet18_lw", "shelfnet34_lw", "unet"),
    *("segformer_b0", "segformer_b1", "segformer_b2", "segformer_b3", "segformer_b4", "segformer_b5"),
]

COUNTS = {
    "pp_lite_t_seg": (8_197_056, 8_027_808),
    "pp_lite_b_seg": (12_412_704, 12_234_240),
    "regseg48": (3_334_983, 3_334_983),
    "stdc1_seg": (9_310_176, 8_275_104),
    "stdc2_seg": (13_340_640, 12_305_568),
    "ddrnet_23": (20_299_366, 20_148_947),
    "ddrnet_23_slim": (5_734_342, 5_695_987),
    "ddrnet_39": (32_660_838, 32_360_275),
    "segformer_b0": (3_719_027, 3_719_027),
    "segformer_b1": (13_682_131, 13_682_131),
    "segformer_b2": (27_361_235, 27_361_235),
    "segformer_b3": (47_237_075, 47_237_075),
    "segformer_b4": (64_007_635, 64_007_635),
    "segformer_b5": (84_607_955, 84_607_955),
}
"""Parameter counts of SuperGradients' networks with and without auxiliary heads, for 19 classes."""

BACKBONES = {
    "pp_lite_t_seg": "encoder.backbone",
    "stdc1_seg": "cp.backbone",
    "regseg48": "backbone",
    "ddrnet_23_slim": "",
    "segformer_b0": "_backbone",
}


@pytest.fixture
def trained(tmp_path):
    """Return a network, and a function that saves `wrap(state_dict)` as a checkpoint and returns its path."""
    network = models.get("ddrnet_23_slim", 5)
    for parameter in network.parameters():
        torch.nn.init.uniform_(parameter)

    def write(wrap):
        torch.save(wrap(network.state_dict()), tmp_path / "weights.pth")
        return tmp_path / "weights.pth"

    return network, write


def same(network, other):
    state = other.state_dict()
    return {key: torch.equal(value, state[key]) for key, value in network.state_dict().items()}


@pytest.mark.parametrize("name", PROMISED)
def test_each_name_builds_a_network_with_num_classes(name):
    with torch.device("meta"):
        network = models.get(name, num_classes=7).eval()
        assert network(torch.empty(1, 3, 64, 64)).shape == ((1, 7) if "resnet" in name else (1, 7, 64, 64))


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_parameter_count_matches_the_original_with_and_without_auxiliary_heads(name, counts):
    def parameters(**options):
        with torch.device("meta"):
            return sum(p.numel() for p in models.get(name, 19, **options).parameters())

    has_heads = counts[0] != counts[1]
    for use, count in zip((True, False), counts, strict=True):
        assert parameters(**({"use_aux_heads": use} if has_heads else {})) == count
    # SuperGradients' default: only STDC networks have auxiliary heads.
    assert parameters() == counts[0 if name.startswith("stdc") else 1]


@pytest.mark.exhaustive  # for each kind of network, a slow test covers the smallest one
@pytest.mark.parametrize(
    "name", ["pp_lite_b_seg", "stdc2_seg", "ddrnet_39", "segformer_b1", "resnet18_cifar"]
)
def test_larger_networks_export_and_compile_as_a_single_graph(name):
    with torch.device("meta"):
        heads = {"use_aux_heads": True} if name in ("pp_lite_b_seg", "ddrnet_39") else {}
        network, x = models.get(name, 19, **heads), torch.empty(2, 3, 128, 64)
    outputs = torch.compile(network, fullgraph=True, dynamic=False, backend="eager")(x)
    main = outputs[0] if isinstance(outputs, tuple) else outputs
    exported = torch.export.export(network.eval(), (x,)).module()
    assert exported(x).shape == main.shape == ((2, 19) if "resnet" in name else (2, 19, 128, 64))


def test_number_of_classes_is_required_exactly_once():
    with pytest.raises(ConfigError, match="num_classes: is required for"):
        models.get("resnet18")
    with pytest.raises(ConfigError, match="is 10, but arch_params sets 19"):
        models.get("resnet18", 10, arch_params={"num_classes": 19})


def test_unknown_name_suggests_the_nearest_name():
    with pytest.raises(UnknownNameError, match="no network is named 'ddrnet23'; did you mean 'ddrnet_23'"):
        models.get("ddrnet23", 19)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "meta": {"epoch": 3}},
        lambda state: {
            "net": {key: torch.zeros_like(v) for key, v in state.items()},
            "ema_net": state,
            "epoch": 3,
        },
        lambda state: {"net": {f"module.{key}": value for key, value in state.items()}, "acc": 0.5},
        lambda state: {"net": {f"_orig_mod.module.{key}": value for key, value in state.items()}},
        lambda state: {
            "state_dict": {**{f"network.{key}": v for key, v in state.items()}, "loss.weight": torch.ones(5)}
        },
    ],
    ids=[
        "tensors",
        "MMEngine",
        "SuperGradients with EMA",
        "SuperGradients under DDP",
        "SuperGradients compiled under DDP",
        "SupervisedModel",
    ],
)
def test_weights_load_from_each_kind_of_checkpoint(trained, wrap):
    network, write = trained
    loaded = models.get("ddrnet_23_slim", 5, checkpoint_path=write(wrap))
    assert all(same(loaded, network).values())


def test_loose_loading_skips_and_logs_mismatches(trained, capsys):
    network, write = trained
    path = write(lambda state: {**{k: v for k, v in state.items() if "spp" not in k}, "odd": torch.ones(1)})
    loaded = models.get("ddrnet_23_slim", 5, checkpoint_path=path, strict_load=False)
    assert all(equal for key, equal in same(loaded, network).items() if "spp" not in key)
    said = capsys.readouterr().err
    assert f"WARNING - loading {path} into DDRNet: missing keys: spp." in said
    assert "unexpected keys: odd" in said


def test_no_key_matching_matches_by_order_and_shape(trained):
    network, write = trained
    path = write(lambda state: {f"layer{number}": value for number, value in enumerate(state.values())})
    with pytest.raises(CheckpointError):
        models.get("ddrnet_23_slim", 5, checkpoint_path=path)
    loaded = models.get("ddrnet_23_slim", 5, checkpoint_path=path, strict_load="no_key_matching")
    assert all(same(loaded, network).values())
    with pytest.raises(
        CheckpointError,
        match=r"layer\d+ and .* are at the same position, .*\(5, 64, 1, 1\) and \(7, 64, 1, 1\)",
    ):
        models.get("ddrnet_23_slim", 7, checkpoint_path=path, strict_load="no_key_matching")


@pytest.mark.parametrize("way", [{"strict_load": "key_matching"}, {"checkpoint_num_classes": 5}])
def test_head_with_different_classes_is_skipped_and_logged(trained, capsys, way):
    network, write = trained
    loaded = models.get("ddrnet_23_slim", 7, checkpoint_path=write(dict), **way)
    assert (
        "final_layer.conv2.weight is (5, 64, 1, 1) in the checkpoint and (7, 64, 1, 1) in the model"
        in capsys.readouterr().err
    )
    assert all(
        equal for key, equal in same(loaded, network).items() if "conv2" not in key or "layer" in key[:5]
    )


@pytest.mark.parametrize("prefix", ["", "backbone.", "module.backbone.", "network.{}"])
@pytest.mark.parametrize(("name", "path"), BACKBONES.items())
def test_backbone_of_each_family_loads_and_logs_mismatches(tmp_path, capsys, name, path, prefix):
    source = models.get(name, 5)
    for parameter in source.parameters():
        torch.nn.init.uniform_(parameter)
    weights = source.get_submodule(path).state_dict()
    prefix = prefix.format(f"{path}." if path else "")
    classifier = {f"{prefix}head.weight": torch.rand(1000, 256), f"{prefix}head.bias": torch.rand(1000)}
    torch.save(
        {"net": {**{prefix + key: v for key, v in weights.items()}, **classifier}}, tmp_path / "weights.pth"
    )
    network = models.get(name, 5, checkpoint_path=tmp_path / "weights.pth", load_backbone=True)
    loaded = network.get_submodule(path).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in weights.items())
    assert "unexpected keys: head.weight, head.bias" in capsys.readouterr().err


@pytest.mark.parametrize("size", [(64, 96), (33, 65), (50, 47)])
@pytest.mark.parametrize(
    ("build", "channels"),
    [(ddrnet_23_slim, [4, 4]), (regseg48, None), (pp_lite_t_seg, [4] * 4), (stdc1_seg, [4, 4, 4, 1])],
)
def test_logits_have_the_size_of_the_input(build, channels, size):
    network = build(num_classes=4)
    x = torch.randn(2, 3, *size)
    outputs = network(x) if channels else [network(x)]
    assert [out.shape for out in outputs] == [(2, c, *size) for c in channels or [4]]
    assert network.eval()(x).shape == (2, 4, *size)


@pytest.mark.slow
@pytest.mark.parametrize("build", [ddrnet_23_slim, regseg48])
def test_training_is_a_single_graph_with_the_same_gradients(build):
    torch.manual_seed(0)
    network = build(num_classes=4).double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def gradients(function):
        outputs = function(x)
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        return torch.autograd.grad(sum(out.square().mean() for out in outputs), list(network.parameters()))

    compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(gradients(compiled), gradients(network), rtol=1e-9, atol=1e-12)
