"""Scripts that follow SuperGradients' quick starts run unchanged on Slipstream, with tiny data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("omegaconf")

SRC = str(Path(__file__).parents[2] / "src")

CLASSIFICATION = """
from pathlib import Path
from PIL import Image
from super_gradients import Trainer, init_trainer, setup_device
from super_gradients.common.object_names import Models
from super_gradients.training import dataloaders, models
from super_gradients.training.metrics.classification_metrics import Accuracy, Top5
from super_gradients.training.processing.processing import (
    ComposeProcessing, ImagePermute, NormalizeImage, Resize, StandardizeImage
)
from super_gradients.training.utils.callbacks import EarlyStop, Phase

init_trainer()
setup_device("cpu")


def loader(name):
    return dataloaders.get(
        name=name, dataset_params={"download": False}, dataloader_params={"num_workers": 0, "batch_size": 4}
    )


def fit(experiment_name, model, data, **changes):
    params = {
        "max_epochs": 1,
        "lr_mode": "CosineLRScheduler",
        "initial_lr": 0.01,
        "optimizer": "SGD",
        "optimizer_params": {"momentum": 0.9, "weight_decay": 1e-4},
        "loss": "CrossEntropyLoss",
        "train_metrics_list": [Accuracy(), Top5()],
        "valid_metrics_list": [Accuracy(), Top5()],
        "metric_to_watch": "Accuracy",
        "greater_metric_to_watch_is_better": True,
        **changes,
    }
    trainer = Trainer(experiment_name=experiment_name, ckpt_root_dir="checkpoints")
    trainer.train(
        model=model, training_params=params, train_loader=loader(f"{data}_train"), valid_loader=loader(f"{data}_val")
    )
    return trainer


# Batches are pairs of normalized images and labels.
train = loader("cifar10_train")
images, labels = next(iter(train))
assert images.is_floating_point() and images.shape == (4, 3, 32, 32) and labels.shape == (4,), labels
assert train.dataloader_params["batch_size"] == 4 and train.dataset.dataset_params["root"]
assert all(train.dataset.classes[label] for label in labels)

# From scratch, on ten classes.
model = models.get(Models.RESNET18_CIFAR, num_classes=10)
trainer = fit("scratch", model, "cifar10")
print("scratch", trainer.test(test_loader=loader("cifar10_val"), test_metrics_list=[Accuracy(), Top5()]))

# Transfer to a hundred classes: only the head is trained.
tuned = models.get(
    Models.RESNET18_CIFAR,
    num_classes=100,
    checkpoint_path="checkpoints/scratch/ckpt_best.pth",
    checkpoint_num_classes=10,
)
before = tuned.conv1.weight.detach().clone()
stop = EarlyStop(phase=Phase.VALIDATION_EPOCH_END, monitor="Accuracy", mode="max", patience=3)
fit("transfer", tuned, "cifar100", finetune=True, phase_callbacks=[stop])
assert before.equal(tuned.conv1.weight)

best = models.get(Models.RESNET18_CIFAR, num_classes=100, checkpoint_path="checkpoints/transfer/ckpt_best.pth")
best.eval()
image_processor = ComposeProcessing(
    [Resize(size=32), StandardizeImage(), NormalizeImage(mean=[0.5] * 3, std=[0.25] * 3), ImagePermute()]
)
best.set_dataset_processing_params(image_processor=image_processor, class_names=loader("cifar100_val").dataset.classes)
Path("photos").mkdir()
Image.new("RGB", (32, 32), (10, 200, 30)).save("photos/frog.png")
predictions = best.predict("photos")
predictions.save("drawn")
print("label", predictions[0].class_name, predictions[0].prediction.confidence)
best.replace_head(new_num_classes=5)
best.prep_model_for_conversion(input_size=[32, 32])
print("classes", best.predict("photos/frog.png").class_names)
"""

SEGMENTATION = """
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from super_gradients import Trainer
from super_gradients.common.object_names import Models
from super_gradients.training import dataloaders, models
from super_gradients.training.metrics.segmentation_metrics import IoU, PixelAccuracy
from super_gradients.training.utils.distributed_training_utils import setup_device

setup_device(device="cpu")


class Discs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        rows, columns = np.mgrid[:64, :96]
        mask = (rows - 20 - 3 * index) ** 2 + (columns - 48) ** 2 < 300
        image = np.where(mask, 0.9, 0.1)[None].repeat(3, 0)
        return torch.tensor(image, dtype=torch.float32), torch.tensor(mask, dtype=torch.long)


loaders = {
    split: dataloaders.get(dataset=Discs(), dataloader_params={"batch_size": 4, "num_workers": 0, "shuffle": shuffle})
    for split, shuffle in (("train", True), ("val", False))
}

# The weights of a network for the 19 classes of Cityscapes.
source = models.get(Models.PP_LITE_T_SEG75, arch_params={"use_aux_heads": False}, num_classes=19)
torch.save({"net": source.state_dict()}, "cityscapes.pth")
model = models.get(
    model_name=Models.PP_LITE_T_SEG75,
    arch_params={"use_aux_heads": False},
    num_classes=2,
    checkpoint_path="cityscapes.pth",
    checkpoint_num_classes=19,
)
assert model.encoder.backbone.state_dict().keys() == source.encoder.backbone.state_dict().keys()
assert all(torch.equal(a, b) for a, b in zip(model.encoder.parameters(), source.encoder.parameters()))

train_params = {
    "max_epochs": 2,
    "lr_mode": "CosineLRScheduler",
    "initial_lr": 0.05,
    "lr_warmup_epochs": 1,
    "multiply_head_lr": 10,
    "optimizer": "SGD",
    "loss": "CrossEntropyLoss",
    "ema": True,
    "ema_params": {"decay": 0.9, "decay_type": "constant"},
    "zero_weight_decay_on_bias_and_bn": True,
    "average_best_models": True,
    "metric_to_watch": "IoU",
    "greater_metric_to_watch_is_better": True,
    "train_metrics_list": [IoU(num_classes=2)],
    "valid_metrics_list": [IoU(num_classes=2), PixelAccuracy()],
    "loss_logging_items_names": ["loss"],
}
trainer = Trainer(experiment_name="segmentation_example", ckpt_root_dir="checkpoints")
trainer.train(
    model=model, training_params=train_params, train_loader=loaders["train"], valid_loader=loaders["val"]
)
print("IoU", trainer.test(model=model, test_loader=loaders["val"], test_metrics_list=[IoU(num_classes=2)])["IoU"])
model.set_dataset_processing_params(class_names=["background", "disc"], image_processor=["SegStandardize"])
image = (Discs()[0][0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
found = model.predict(Image.fromarray(image))
found.save("disc.png")
print("shape", found.prediction.segmentation_map.shape)
"""

TRANSFER = """
import os
import torch
from PIL import Image
from super_gradients import Trainer
from super_gradients.common.object_names import Models
from super_gradients.training import dataloaders, models
from super_gradients.training.metrics.segmentation_metrics import BinaryIOU
from super_gradients.training.utils.callbacks import BinarySegmentationVisualizationCallback, Phase

trainer = Trainer(experiment_name="segmentation_transfer_learning", ckpt_root_dir="./checkpoints/")
options = {
    "dataset_params": {"root_dir": "persons", "transforms": ["SegStandardize", {"SegNormalize": {"mean": [0.5] * 3,
        "std": [0.25] * 3}}, {"SegConvertToTensor": {"mask_output_dtype": "long"}}]},
    "dataloader_params": {"batch_size": 4, "num_workers": 0},
}
train_loader = dataloaders.supervisely_persons_train(**options)
valid_loader = dataloaders.supervisely_persons_val(**options)
assert train_loader.dataloader_params["batch_size"] == 4
assert train_loader.dataset.dataset_params["root_dir"] == "persons"
for i in range(2):
    img_path, target_path = train_loader.dataset.samples_targets_tuples_list[i]
    assert Image.open(img_path).size == Image.open(target_path).size
images, masks = next(iter(valid_loader))
print("batch", images.dtype, masks.dtype)

source = models.get(Models.PP_LITE_T_SEG75, num_classes=19, arch_params={"use_aux_heads": False})
torch.save(source.state_dict(), "cityscapes.pth")
model = models.get(
    model_name=Models.PP_LITE_T_SEG75,
    arch_params={"use_aux_heads": False},
    num_classes=1,
    checkpoint_path="cityscapes.pth",
    checkpoint_num_classes=19,
)
callback = BinarySegmentationVisualizationCallback(
    phase=Phase.VALIDATION_BATCH_END, freq=1, last_img_idx_in_batch=2
)
train_params = {
    "max_epochs": 1, "lr_mode": "cosine", "initial_lr": 0.005, "lr_warmup_epochs": 5, "multiply_head_lr": 10,
    "optimizer": "SGD", "loss": "BCEDiceLoss", "ema": True,
    "ema_params": {"decay": 0.9999, "decay_type": "exp", "beta": 15},
    "zero_weight_decay_on_bias_and_bn": True, "average_best_models": True, "metric_to_watch": "target_IOU",
    "greater_metric_to_watch_is_better": True, "train_metrics_list": [BinaryIOU()],
    "valid_metrics_list": [BinaryIOU()], "loss_logging_items_names": ["loss"], "phase_callbacks": [callback],
}
trainer.train(model=model, training_params=train_params, train_loader=train_loader, valid_loader=valid_loader)
print("best " + str(trainer.best_metric))
model = models.get(
    model_name=Models.PP_LITE_T_SEG75,
    arch_params={"use_aux_heads": False},
    num_classes=1,
    checkpoint_path=os.path.join(trainer.checkpoints_dir_path, "ckpt_best.pth"),
).eval()
model.predict("persons/images/0.png").save("person.png")
model.prep_model_for_conversion(input_size=[1, 3, 64, 64])
print("shape", tuple(model(torch.randn(1, 3, 64, 64)).shape))
"""


def run(folder: Path, text: str) -> dict[str, str]:
    """Run a script. Return a dict of the printed lines, keyed by their first word."""
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.supergradients", "script.py"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SRC}, timeout=300, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.slow
def test_image_classification_runs_from_scratch_and_with_transfer_learning(tmp_path):
    rng = np.random.default_rng(0)
    for folder, files, labels, classes in (
        ("cifar10/cifar-10-batches-bin", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 1, 10),
        ("cifar100/cifar-100-binary", ["train", "test"], 2, 100),
    ):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for name in files:
            records = rng.integers(256, size=(4, labels + 3072), dtype=np.uint8)
            records[:, labels - 1] %= classes
            (tmp_path / "data" / folder / f"{name}.bin").write_bytes(records.tobytes())
    printed = run(tmp_path, CLASSIFICATION)
    assert "'Accuracy'" in printed["scratch"]
    assert "'Top5'" in printed["scratch"]
    name, confidence = printed["label"].split()
    assert name.isidentifier()
    assert 0.01 < float(confidence) <= 1
    assert printed["classes"] == "('0', '1', '2', '3', '4')"
    assert Image.open(tmp_path / "drawn/pred_0.jpg").size[1] > 32


@pytest.mark.slow
def test_segmentation_runs_with_transfer_learning(tmp_path):
    printed = run(tmp_path, SEGMENTATION)
    assert 0 <= float(printed["IoU"]) <= 1
    assert printed["shape"] == "(64, 96)"
    assert Image.open(tmp_path / "disc.png").size == (96, 64)
    assert (tmp_path / "checkpoints/segmentation_example/average_model.pth").is_file()


@pytest.mark.slow
def test_transfer_learning_for_persons_runs(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(8):
        for folder, shape, top in (("images", (64, 96, 3), 256), ("masks", (64, 96), 2)):
            (tmp_path / "persons" / folder).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(top, size=shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "persons" / folder / f"{i}.png")
        rows.append(f"images/{i}.png,masks/{i}.png")
    for name in ("train.csv", "val.csv"):
        (tmp_path / "persons" / name).write_text("\n".join(rows))
    printed = run(tmp_path, TRANSFER)
    assert printed["batch"] == "torch.float32 torch.int64"
    assert 0 <= float(printed["best"]) <= 1
    assert printed["shape"] == "(1, 1, 64, 64)"
    recorded = list((tmp_path / "checkpoints").rglob("predictions*.png"))
    assert recorded, "the callback recorded no images"
