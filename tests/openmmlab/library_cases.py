"""Stock configurations from OpenMMLab's libraries, and changes to train them on small generated datasets."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from library_data import write_cifar, write_cityscapes, write_coco, write_imagenet


@dataclass(frozen=True)
class Case:
    """A stock configuration and its changes. In the changes, `{data}` stands for the data folder."""

    library: str
    config: str
    write: Callable[[Path], Path]
    metric: str
    """Text that the validation log must contain."""
    changes: tuple[str, ...] = ()
    iterations: bool = False
    """Whether the length of training is specified in iterations instead of epochs."""
    header: str = ""
    """Code to add to the configuration file."""

    def text(self) -> str:
        """Return a configuration file that inherits the stock configuration."""
        return f"_base_ = {str(folder(self.library) / '.mim/configs' / self.config)!r}\n{self.header}"

    def options(self, data: Path, length: int) -> list[str]:
        """Return the changes for `--cfg-options`, with a training length of `length` epochs or iterations."""
        key = "max_iters" if self.iterations else "max_epochs"
        changes = (*_COMMON, *self.changes, f"train_cfg.{key}={length}")
        return [change.replace("{data}", str(data)) for change in changes]

    @property
    def needs_operators(self) -> bool:
        """Whether the library imports mmcv's compiled operators."""
        return self.library != "mmpretrain"


def folder(library: str) -> Path:
    """Return the folder of an installed package."""
    return Path(importlib.util.find_spec(library).origin).parent


def missing(case: Case) -> str | None:
    """Return why a case cannot run in this environment, or None."""
    if importlib.util.find_spec(case.library) is None:
        return f"{case.library} is not installed; run make openmmlab"
    if case.needs_operators and not list(folder("mmcv").glob("_ext*")):
        return "mmcv is installed without its compiled operators, which this library imports"
    return None


_COMMON = (
    "train_dataloader.num_workers=0",
    "val_dataloader.num_workers=0",
    "train_dataloader.persistent_workers=False",
    "val_dataloader.persistent_workers=False",
    "default_hooks.logger.interval=1",
    "randomness.seed=1",
    "train_dataloader.dataset.data_root={data}/",
    "val_dataloader.dataset.data_root={data}/",
)
_IMAGENET = (
    "train_dataloader.dataset.metainfo.classes=[a,b,c,d]",
    "val_dataloader.dataset.metainfo.classes=[a,b,c,d]",
    "train_dataloader.batch_size=4",
    "val_dataloader.batch_size=4",
    "param_scheduler.1.begin=0",  # the stock value is 20, after the end of the run
)
_CITYSCAPES = (
    "model.data_preprocessor.size=(64,64)",
    "train_dataloader.dataset.pipeline.2.scale=(128,64)",
    "train_dataloader.dataset.pipeline.3.crop_size=(64,64)",
    "val_dataloader.dataset.pipeline.1.scale=(128,64)",
    "train_cfg.val_interval=2",
    "default_hooks.checkpoint.interval=2",
)
_COCO = (
    "val_evaluator.ann_file={data}/annotations/instances_val2017.json",
    "val_dataloader.dataset.pipeline.1.scale=(128,96)",
    "model.backbone.init_cfg=None",
)
_RESIZED = "train_dataloader.dataset.pipeline.2.scale=(128,96)"
_MOSAIC = (
    "train_dataloader.dataset.pipeline.2.img_scale=(128,128)",
    "train_dataloader.dataset.pipeline.3.scale=(256,256)",
    "train_dataloader.dataset.pipeline.4.crop_size=(128,128)",
    "train_dataloader.dataset.pipeline.7.size=(128,128)",
    "train_dataloader.dataset.pipeline.8.img_scale=(128,128)",
    "val_dataloader.dataset.pipeline.2.size=(128,128)",
)
_RTMDET = (
    "model.bbox_head.num_classes=2",
    "train_cfg.dynamic_intervals=None",
    "train_cfg.val_interval=1",
    "default_hooks.checkpoint.interval=1",
    "train_dataloader.batch_size=2",
)

CASES = {
    "ResNet-18": Case(
        "mmpretrain",
        "resnet/resnet18_8xb16_cifar10.py",
        write_cifar,
        "accuracy/top1",
        header="custom_imports = dict(imports=['any_cifar'])\n",
    ),
    "Swin-T": Case(
        "mmpretrain",
        "swin_transformer/swin-tiny_16xb64_in1k.py",
        write_imagenet,
        "accuracy/top1",
        _IMAGENET,
    ),
    "PSPNet": Case(
        "mmseg",
        "pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py",
        write_cityscapes,
        "mIoU",
        (*_CITYSCAPES, "model.pretrained=None"),
        iterations=True,
    ),
    "DeepLabV3+": Case(
        "mmseg",
        "deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024.py",
        write_cityscapes,
        "mIoU",
        (*_CITYSCAPES, "model.pretrained=None"),
        iterations=True,
    ),
    "SegFormer-B0": Case(
        "mmseg",
        "segformer/segformer_mit-b0_8xb1-160k_cityscapes-1024x1024.py",
        write_cityscapes,
        "mIoU",
        (
            *_CITYSCAPES,
            "model.backbone.init_cfg=None",
            "model.test_cfg.crop_size=(64,64)",
            "model.test_cfg.stride=(48,48)",
        ),
        iterations=True,
    ),
    "RetinaNet": Case(
        "mmdet",
        "retinanet/retinanet_r18_fpn_1x_coco.py",
        write_coco,
        "Epoch(val)",  # There are no metrics, because the network does not detect any objects yet.
        (*_COCO, _RESIZED, "model.bbox_head.num_classes=2"),
    ),
    "Faster R-CNN": Case(
        "mmdet",
        "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
        write_coco,
        "bbox_mAP",
        (*_COCO, _RESIZED, "model.roi_head.bbox_head.num_classes=2"),
    ),
    "RTMDet-tiny": Case(
        "mmdet", "rtmdet/rtmdet_tiny_8xb32-300e_coco.py", write_coco, "bbox_mAP", (*_COCO, *_MOSAIC, *_RTMDET)
    ),
}
