"""Run the inferencer of mmdetection or mmsegmentation with a stock configuration and untrained weights."""

import json
import sys
from pathlib import Path

import numpy as np
from mmengine.analysis import get_model_complexity_info
from mmengine.hub import get_config

LIBRARY = sys.argv[1]
image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
if LIBRARY == "mmdet":
    from mmdet.apis import DetInferencer

    cfg = get_config("mmdet::retinanet/retinanet_r18_fpn_1x_coco.py", pretrained=True)
    assert cfg.model_path.endswith(".pth")
    cfg.model.backbone.init_cfg = None
    inferencer = DetInferencer(cfg, device="cpu", show_progress=False)
    out = inferencer([image, image[:32]], return_vis=True)
    shapes = [list(picture.shape) for picture in out["visualization"]]
    found = [len(sample["scores"]) == len(sample["bboxes"]) for sample in out["predictions"]]
else:
    from mmseg.apis import MMSegInferencer

    cfg = get_config("mmseg::pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py")
    cfg.model.pretrained = None
    for part in (cfg.model.backbone, cfg.model.decode_head, cfg.model.auxiliary_head):
        part.norm_cfg = dict(type="BN")
    cfg.model.data_preprocessor.size = (64, 96)
    cfg.test_pipeline[1].scale = (96, 64)
    inferencer = MMSegInferencer(cfg, device="cpu", scope="mmseg", classes="cityscapes", palette="cityscapes")
    prediction = inferencer(image)["predictions"]
    shapes = [list(prediction.shape)]
    found = [bool(np.isin(prediction, range(19)).all())]
info = get_model_complexity_info(inferencer.model, (3, 64, 64), show_table=False, show_arch=False)
params = sum(parameter.numel() for parameter in inferencer.model.parameters())
result = {"shapes": shapes, "found": found, "params": info["params"] == params, "flops": info["flops"]}
print("RESULT " + json.dumps({**result, "script": Path(__file__).name}))
