"""Which modules of a model are sharded as units."""

import pytest
from torch import nn

from slipstream.errors import ConfigError
from slipstream.model.wrappers.fully_sharded import FullyShardedOptions, _blocks, whole_weights


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


def chosen(model, **options):
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in _blocks(model, FullyShardedOptions(**options))]


def test_large_blocks_that_repeat_are_units_by_default():
    assert chosen(Net(width=520)) == ["blocks.1", "blocks.0"]


def test_small_ones_stay_with_the_rest():
    assert chosen(Net()) == []


def test_classes_are_found_by_name_also_by_that_of_a_base():
    class Special(Block):
        pass

    model = Net()
    model.blocks.append(Special(4))
    assert sorted(chosen(model, wrap=["Block"])) == ["blocks.0", "blocks.1", "blocks.2"]


def test_an_unknown_class_names_the_nearest():
    with pytest.raises(ConfigError, match="no module of the class 'block'; did you mean 'Block'"):
        chosen(Net(), wrap=["block"])


def test_by_size_the_smallest_modules_that_reach_it_are_units_and_what_holds_only_them_is_none():
    assert chosen(Net(), min_params=20) == ["blocks.1.layers.0", "blocks.0.layers.0"]
    assert chosen(Net(), min_params=16) == ["blocks.1.layers.0", "blocks.0.layers.0", "stem"]


def test_a_list_is_no_unit_since_it_is_never_called():
    assert chosen(Net(), min_params=30) == []
    with pytest.raises(ConfigError, match="no module of the class 'ModuleList'"):
        chosen(Net(), wrap=["ModuleList"])


def test_a_block_that_shares_a_weight_with_another_part_stays_with_the_rest():
    model = Net()
    model.blocks[0].layers[0].weight = model.blocks[1].layers[0].weight
    assert chosen(model, wrap=["Block"]) == []


def test_weights_of_a_model_that_is_not_sharded_are_whole_already():
    model = Net()
    weight = model.stem.weight
    with whole_weights(model):
        assert model.stem.weight is weight
