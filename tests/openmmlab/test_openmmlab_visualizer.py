"""Test that scopes and the visualizer behave as in MMEngine."""

import numpy as np
from mmengine.registry import TRANSFORMS, DefaultScope, Registry
from mmengine.visualization import Visualizer

from slipstream.registry import TRANSFORMS as OWN_TRANSFORMS


def test_a_library_can_register_a_class_under_the_name_of_a_slipstream_class():
    own = OWN_TRANSFORMS.get("Normalize")

    @TRANSFORMS.register_module()
    class Normalize: ...

    library = Registry("transform", parent=TRANSFORMS, scope="a_library")
    assert library.get("Normalize") is Normalize
    assert library.get("slipstream.Normalize") is own
    assert OWN_TRANSFORMS.get("Normalize") is own
    assert OWN_TRANSFORMS.get("mmengine.Normalize") is Normalize


def test_the_default_scope_changes_only_inside_the_block():
    before = DefaultScope.get_current_instance()
    with DefaultScope.overwrite_default_scope("mmengine"):
        assert DefaultScope.get_current_instance().scope_name == "mmengine"
    after = DefaultScope.get_current_instance()
    assert (after and after.scope_name) == (before and before.scope_name)


def test_the_visualizer_draws_on_the_image():
    class Special(Visualizer): ...

    visualizer = Special("special", image=np.zeros((40, 60, 3), np.uint8))
    assert Visualizer.get_current_instance() is visualizer
    assert visualizer.get_image().shape == (40, 60, 3)
    assert visualizer.get_image().max() == 0
    mask = np.zeros((40, 60), bool)
    mask[10:20, 30:50] = True
    picture = visualizer.draw_binary_masks(mask, colors=(200, 100, 0), alphas=0.5).get_image()
    assert picture[15, 40].tolist() == [100, 50, 0]
    assert picture[30, 40].tolist() == [0, 0, 0]
    boxes = np.array([[5.0, 5.0, 20.0, 30.0]])
    picture = visualizer.draw_bboxes(boxes, edge_colors=(0, 255, 0), alpha=1.0).get_image()
    assert picture[15, 4:7, 1].max() > 200
