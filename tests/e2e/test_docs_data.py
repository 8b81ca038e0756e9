"""docs/data.md: its custom loop trains on images with device transforms applied."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs/data.md"


def test_custom_loop_trains_on_transformed_images_that_change_each_epoch():
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[-1]
    scope = {}
    seen = []
    watch = torch.nn.modules.module.register_module_forward_pre_hook(lambda _, images: seen.append(images[0]))
    try:
        exec(compile(script, str(PAGE), "exec"), scope)
    finally:
        watch.remove()
    images = [image for image in seen if image.shape[1] == 3]
    assert all(image.dtype == torch.float32 and 0.2 < image.max() <= 1 for image in images)
    first, second = torch.cat(images[:2]), torch.cat(images[2:])
    assert sorted(first.mean((1, 2, 3)).tolist()) != sorted(second.mean((1, 2, 3)).tolist())
    assert scope["log"]["loss"].isfinite()
