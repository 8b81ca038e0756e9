"""Tests of the selection of the modules that FSDP2 shards as separate units."""

from torch import nn

from slipstream.model.wrappers.fully_sharded import FullyShardedOptions, _blocks, full_weights


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 2)


def units(model, **options):
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in _blocks(model, FullyShardedOptions(**options))]


def test_large_repeated_blocks_are_units_by_default():
    assert units(Net(width=520)) == ["blocks.1", "blocks.0"]


def test_small_blocks_are_not_units():
    assert units(Net()) == []


def test_wrap_matches_class_and_base_class_names():
    class Special(Block):
        pass

    model = Net()
    model.blocks.append(Special(4))
    assert sorted(units(model, wrap=["Block"])) == ["blocks.0", "blocks.1", "blocks.2"]


def test_block_with_a_shared_weight_is_not_a_unit():
    model = Net()
    model.blocks[0].layers[0].weight = model.blocks[1].layers[0].weight
    assert units(model, wrap=["Block"]) == []


def test_whole_weights_does_not_change_an_unsharded_model():
    model = Net()
    weight = model.stem.weight
    with full_weights(model):
        assert model.stem.weight is weight
