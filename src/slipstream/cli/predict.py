"""`slipstream predict`: write class masks and overlays for images and videos, and count the pixels of each class."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.cli.predict_inputs import TABLE, Input, find_inputs, frame_rate, frames, video_writer
from slipstream.cli.tables import print_table, printable
from slipstream.cli.trained import TrainedModel, find_checkpoint, load_trained
from slipstream.dataset.prediction import prepare_image
from slipstream.devices import default_device, is_out_of_memory
from slipstream.errors import CheckpointError, ConfigError, DataError, ModelError, SlipstreamError
from slipstream.extras import extra
from slipstream.files import atomic_write, write_text
from slipstream.model import Classifier
from slipstream.visualization import overlay

with extra("images"):
    from PIL import Image

    from slipstream.dataset.sources.decode import MAX_PIXELS, read_image

__all__ = ["run"]

Mask = NDArray[np.uint8]
RGB = NDArray[np.uint8]
_MAX_CLASSES = 256
"""Maximum number of classes in a mask file."""


def run(args: argparse.Namespace) -> int:
    """Write the masks, the overlays and `classes.csv` to the `--out` folder.

    Returns:
        0, or 1 if any file could not be processed. The remaining files are still processed.
    """
    path = find_checkpoint(args.checkpoint)
    inputs = find_inputs(args.images, Path(args.out))
    out = Path(args.out)
    trained = load_trained(path, args.config, bool(args.trust), default_device())
    _check_segmentation(trained)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder: {error}; choose a different folder", "--out") from error
    job = _Job(trained, out, args.max_pixels or MAX_PIXELS, args.every, quiet=args.json)
    job.say(f"Checkpoint: {trained.description}")
    try:
        for item in inputs:
            job.process(item)
    finally:
        job.finish()
    return 1 if job.failed else 0


def _check_segmentation(trained: TrainedModel) -> None:
    """Check that the model predicts a class for each pixel, and that the checkpoint contains the class colors."""
    model, path, palette = trained.model, trained.path, trained.palette
    # Classification datasets may have a palette, and `SupervisedModel` trains networks for both tasks.
    task = getattr(getattr(model, "network", None), "task", None)
    if isinstance(model, Classifier) or task == "classification":
        raise CheckpointError(
            f"{path} contains a classification model; `slipstream predict` requires a segmentation checkpoint"
        )
    if palette is None:
        raise CheckpointError(
            f"{path} does not contain a class palette, which `slipstream predict` requires; add 'palette' to the "
            "dataset's metainfo, and train again"
        )
    if len(palette) > _MAX_CLASSES:
        raise CheckpointError(
            f"{path} has {len(palette)} classes; a mask file can contain at most {_MAX_CLASSES}"
        )


class _Job:
    """Predicts masks for a list of files, and collects the results.

    Args:
        quiet: whether to print JSON at the end instead of text.
    """

    def __init__(self, trained: TrainedModel, out: Path, max_pixels: int, every: int, quiet: bool) -> None:
        self.trained, self.out, self.max_pixels, self.every, self.quiet = (
            trained,
            out,
            max_pixels,
            every,
            quiet,
        )
        self.palette = trained.palette or ()
        self.predict = _predictor(trained.model, trained.transforms)
        self.counts: dict[str, NDArray[np.int64]] = {}
        self.written: dict[str, list[str]] = {}
        self.failed: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Print a line, unless `--json` is set."""
        if not self.quiet:
            print(printable(text), flush=True)

    def process(self, item: Input) -> None:
        """Write the results for one file. If the file cannot be processed, or memory runs out, store the error."""
        name, stem = str(item.path), self.out / item.stem
        stem.parent.mkdir(parents=True, exist_ok=True)
        try:
            written = self._video(item.path, stem) if item.is_video else self._picture(item.path, stem)
        except BaseException as error:
            self.counts.pop(name, None)  # a video may fail after some of its frames were counted
            if not (isinstance(error, SlipstreamError) or is_out_of_memory(error)):
                raise
            self.failed[name] = _reason(item.path, error)
            return
        self.written[name] = [str(path) for path in written]
        self.say(f"{name} -> {', '.join(self.written[name])}")

    def finish(self) -> None:
        """Write the class statistics, then print the statistics and the errors."""
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["file", *self.trained.classes])
        for name, counts in self.counts.items():
            writer.writerow([name, *(f"{share:.6f}" for share in _shares(counts))])
        write_text(self.out / TABLE, table.getvalue(), "surrogateescape")
        if self.quiet:
            print(json.dumps(self._results(), indent=1))
        elif self.counts:
            total = _shares(np.sum(list(self.counts.values()), axis=0))
            num_files = np.sum([counts > 0 for counts in self.counts.values()], axis=0)
            rows = zip(self.trained.classes, total, num_files, strict=True)
            cells = [(name, f"{share:.2%}", f"{files} of {len(self.counts)}") for name, share, files in rows]
            header = ("class", "share of pixels", "found in")
            print_table(header, cells, 60, right=header[1:])
            print(f"Shares per file: {self.out / TABLE}")
        for message in self.failed.values():
            print(printable(f"slipstream: error: {message}"), file=sys.stderr)

    def _picture(self, path: Path, stem: Path) -> list[Path]:
        mask, blended = self._segment(path, read_image(path, self.max_pixels))
        files = [Path(f"{stem}_mask.png"), Path(f"{stem}_overlay.png")]
        self._save_mask(mask, files[0])
        _save(Image.fromarray(blended), files[1])
        return files

    def _video(self, path: Path, stem: Path) -> list[Path]:
        """Write one mask file per frame, and a video of overlays. A compressed video would not preserve class ids."""
        files = [Path(f"{stem}_mask"), Path(f"{stem}_overlay.mp4")]
        index = -1
        with ExitStack() as stack:
            write = None
            for index, image in frames(path, self.every):
                if write is None:
                    files[0].mkdir(parents=True, exist_ok=True)
                    write = stack.enter_context(video_writer(files[1], frame_rate(path) / self.every))
                mask, blended = self._segment(path, image)
                self._save_mask(mask, files[0] / f"{index:06d}.png")
                write(blended)
        if index < 0:
            raise DataError(f"cannot read '{path}': the video has no frames; remove it from the arguments")
        return files

    def _segment(self, path: Path, image: RGB) -> tuple[Mask, RGB]:
        """Return the mask and the overlay of an image, and add its pixels to the counts."""
        mask = self.predict(image)
        blended = overlay(image, mask, self.palette)  # also checks the class ids
        counts = np.bincount(mask.ravel(), minlength=len(self.palette))
        self.counts[str(path)] = self.counts.get(str(path), np.zeros_like(counts)) + counts
        return mask, blended

    def _save_mask(self, mask: Mask, path: Path) -> None:
        """Write a PNG whose pixel values are class ids, and whose palette contains the class colors."""
        picture = Image.frombytes("P", (mask.shape[1], mask.shape[0]), mask.tobytes())
        picture.putpalette(np.asarray(self.palette, np.uint8).tobytes())
        _save(picture, path)

    def _results(self) -> Mapping[str, Any]:
        def shares(counts: NDArray[np.int64]) -> Mapping[str, float]:
            return dict(zip(self.trained.classes, map(float, _shares(counts)), strict=True))

        return {
            "checkpoint": str(self.trained.path),
            "files": [
                {"file": name, "written": written, "classes": shares(self.counts[name])}
                for name, written in self.written.items()
            ],
            "failed": [{"file": name, "error": error} for name, error in self.failed.items()],
        }


def _predictor(model: Any, transforms: Sequence[Any]) -> Callable[[NDArray[np.uint8]], Mask]:
    """Return a function that predicts the class of each pixel of an image, using the validation transforms."""

    @torch.no_grad()
    def predict(image: NDArray[np.uint8]) -> Mask:
        prepared = prepare_image(image, transforms)
        preds = model.val_step({key: value[None] for key, value in prepared.sample.items()})["preds"]
        if preds.ndim != 3:
            raise ModelError(
                f"the predictions must be class ids of shape (N, H, W), but their shape is {tuple(preds.shape)}; "
                "`slipstream predict` requires a segmentation checkpoint"
            )
        mask: Mask = prepared.resize_to_image(preds[0]).to(torch.uint8).numpy()
        return mask

    return predict


def _reason(path: Path, error: BaseException) -> str:
    """Return the message for a file that could not be processed."""
    if isinstance(error, SlipstreamError):
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"cannot segment '{path}': out of memory ({first}); reduce the image size, or use a different machine"
    )


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / max(counts.sum(), 1)
    return shares


def _save(picture: Image.Image, path: Path) -> None:
    with atomic_write(path) as temporary:
        picture.save(temporary, "PNG")
