"""Small generated datasets in the formats that OpenMMLab's libraries read."""

import json
import pickle

import numpy as np
from PIL import Image


def write_cifar(folder, samples=80, seed=0):
    """Write files in CIFAR-10's format. The class determines which channel is brighter, and in how many rows."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, samples // 5)
        images = rng.integers(0, 80, (len(labels), 3, 32, 32), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[label % 3, : 8 + 2 * label] += np.uint8(120)
        content = {"data": images.reshape(len(labels), -1), "labels": labels.tolist()}
        (target / name).write_bytes(pickle.dumps(content))
    meta = {"label_names": [f"class{i}" for i in range(10)]}
    (target / "batches.meta").write_bytes(pickle.dumps(meta))
    return folder


def write_cityscapes(folder, samples=4, size=(64, 128), seed=0):
    """Write folders in Cityscapes' layout. The color of a pixel determines its class."""
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        for kind in ("leftImg8bit", "gtFine"):
            (folder / kind / split / "town").mkdir(parents=True)
        for i in range(samples):
            coarse = rng.integers(0, 19, (size[0] // 16, size[1] // 16), dtype=np.uint8)
            labels = np.kron(coarse, np.ones((16, 16), dtype=np.uint8))
            image = np.stack([labels * 13, 255 - labels * 13, labels * 5], axis=-1)
            stem = f"town_{i:06}_000019"
            Image.fromarray(image).save(folder / f"leftImg8bit/{split}/town/{stem}_leftImg8bit.png")
            Image.fromarray(labels).save(folder / f"gtFine/{split}/town/{stem}_gtFine_labelTrainIds.png")
    return folder


def write_coco(folder, samples=6, size=(96, 128), seed=0):
    """Write files in COCO's format. Bright rectangles belong to category 1 (person) or 3 (car)."""
    rng = np.random.default_rng(seed)
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": i, "name": name} for i, name in ((1, "person"), (3, "car"))]
    for split in ("train2017", "val2017"):
        (folder / split).mkdir()
        images, annotations = [], []
        for i in range(samples):
            pixels = rng.integers(0, 60, (*size, 3), dtype=np.uint8)
            for _ in range(2):
                x, y = (int(v) for v in (rng.integers(0, size[1] - 48), rng.integers(0, size[0] - 48)))
                w, h = (int(v) for v in rng.integers(24, 48, 2))
                category = int(rng.choice([1, 3]))
                pixels[y : y + h, x : x + w, category % 2] = 220
                box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0, "category_id": category}
                annotations.append({"id": len(annotations) + 1, "image_id": i, **box})
            name = f"{i:012}.jpg"
            Image.fromarray(pixels).save(folder / split / name)
            images.append({"id": i, "file_name": name, "height": size[0], "width": size[1]})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    return folder


def write_imagenet(folder, samples=4, size=256, seed=0):
    """Write folders in ImageNet's layout, with four classes. Each class brightens one channel by a different value."""
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        for label in range(4):
            (folder / split / f"n{label}").mkdir(parents=True)
            for i in range(samples):
                pixels = rng.integers(0, 80, (size, size, 3), dtype=np.uint8)
                pixels[..., label % 3] += np.uint8(60 + 30 * label)
                Image.fromarray(pixels).save(folder / split / f"n{label}/{i}.JPEG", format="JPEG")
    return folder
