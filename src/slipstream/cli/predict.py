"""`slipstream predict`: write class masks and overlays for images and videos, and count the pixels of each class."""

from __future__ import annotations

import argparse
import csv
import glob
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.cli.profile import prepare_output_folder
from slipstream.cli.tables import print_table, printable
from slipstream.cli.trained import TrainedModel, find_checkpoint, load_trained
from slipstream.dataset.prediction import prepare_image
from slipstream.devices import default_device
from slipstream.errors import CheckpointError, DataError, ModelError, SlipstreamError
from slipstream.extras import extra
from slipstream.files import atomic_write, write_text
from slipstream.model import Classifier
from slipstream.visualization import overlay

with extra("images"):
    from PIL import Image

    from slipstream.dataset.sources.decode import read_image

Mask = NDArray[np.uint8]
RGB = NDArray[np.uint8]

# Name of the file with the class shares, which is in every output folder.
_TABLE = "classes.csv"
_IMAGES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")


def run(args: argparse.Namespace) -> int:
    """Write the masks, the overlays and `classes.csv` to the `--out` folder.

    Returns:
        0, or 1 if any file could not be processed. The remaining files are still processed.
    """
    out = Path(args.out)
    path = find_checkpoint(args.checkpoint)
    inputs = _find_inputs(args.images, out)
    trained = load_trained(path, args.config, bool(args.trust), default_device())
    _check_segmentation(trained)
    prepare_output_folder(out)
    job = _Job(trained, out, args.every)
    print(printable(f"Checkpoint: {trained.description}"), flush=True)
    try:
        for stem, source in inputs.items():
            job.process(source, out / stem)
    finally:
        job.finish()
    return 1 if job.failed else 0


def _check_segmentation(trained: TrainedModel) -> None:
    """Check that the model predicts a class for each pixel, and that the checkpoint contains the class colors."""
    # Classification datasets may have a palette, and `SupervisedModel` trains networks for both tasks.
    task = getattr(getattr(trained.model, "network", None), "task", None)
    if isinstance(trained.model, Classifier) or task == "classification":
        raise CheckpointError(
            f"{trained.path} contains a classifier; `slipstream predict` requires segmentation"
        )
    if trained.palette is None or len(trained.palette) > 256:
        raise CheckpointError(
            f"{trained.path} must contain a palette of at most 256 classes; set 'palette' in the dataset's metainfo, "
            "and train again"
        )


def _find_inputs(names: Sequence[str], out: Path) -> dict[Path, Path]:
    """Return the files to process, keyed by the path of their output files, without suffix and relative to `out`.

    A name is a file, a folder (which stands for all images and videos in it and its subfolders), or a pattern.

    Raises:
        DataError: a name matches no file, `out` contains a folder, or two files would have the same output files.
    """
    inputs: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            root, files = path, sorted(path.rglob("*"))
        elif glob.has_magic(name) and not path.exists():
            root = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
            files = [Path(p) for p in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207  (absolute patterns)
        else:
            root, files = path.parent, [path]
        selected = [p for p in files if p == path or (p.suffix.lower() in _IMAGES + _VIDEOS and p.is_file())]
        selected = [p for p in selected if out.resolve() not in p.resolve().parents]
        if not selected:
            raise DataError(f"{name} matches no image or video; check the path")
        for file in selected:
            stem = file.relative_to(root).with_suffix("")
            if (first := inputs.setdefault(stem, file)) != file:
                raise DataError(
                    f"{first} and {file} have the same output files; use different `--out` folders for them"
                )
    return inputs


class _Job:
    """Predicts masks for files, and collects the results."""

    def __init__(self, trained: TrainedModel, out: Path, every: int) -> None:
        self.trained, self.out, self.every = trained, out, every
        self.palette = trained.palette or ()
        self.counts: dict[str, NDArray[np.int64]] = {}
        self.failed: dict[str, str] = {}

    def process(self, path: Path, stem: Path) -> None:
        """Write the results for one file. If the file cannot be processed, store the error."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        try:
            is_video = path.suffix.lower() in _VIDEOS
            written = self._video(path, stem) if is_video else self._picture(path, stem)
        except SlipstreamError as error:
            self.counts.pop(str(path), None)  # a video may fail after some of its frames were counted
            self.failed[str(path)] = str(error)
            return
        print(printable(f"{path} -> {', '.join(map(str, written))}"), flush=True)

    def finish(self) -> None:
        """Write the class statistics, then print the statistics and the errors."""
        table, classes = io.StringIO(), self.trained.classes
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["file", *classes])
        writer.writerows([name, *(f"{x:.6f}" for x in _shares(n))] for name, n in self.counts.items())
        write_text(self.out / _TABLE, table.getvalue(), "surrogateescape")
        if self.counts:
            total = _shares(np.sum(list(self.counts.values()), axis=0))
            found = np.sum([counts > 0 for counts in self.counts.values()], axis=0)
            rows = zip(classes, total, found, strict=True)
            cells = [(name, f"{share:.2%}", f"{files} of {len(self.counts)}") for name, share, files in rows]
            print_table(("class", "pixels", "found in"), cells, 60, right=("pixels", "found in"))
            print(f"Shares per file: {self.out / _TABLE}")
        for message in self.failed.values():
            print(printable(f"slipstream: error: {message}"), file=sys.stderr)

    def _picture(self, path: Path, stem: Path) -> list[Path]:
        mask, blended = self._segment(path, read_image(path))
        files = [Path(f"{stem}_mask.png"), Path(f"{stem}_overlay.png")]
        self._save_mask(mask, files[0])
        _save(Image.fromarray(blended), files[1])
        return files

    def _video(self, path: Path, stem: Path) -> list[Path]:
        """Write one mask file per frame, and a video of overlays. A compressed video would not preserve class ids."""
        files = [Path(f"{stem}_mask"), Path(f"{stem}_overlay.mp4")]
        with ExitStack() as stack:
            write = None
            for index, image, rate in _frames(path, self.every):
                if write is None:
                    files[0].mkdir(parents=True, exist_ok=True)
                    write = stack.enter_context(_video_writer(files[1], rate / self.every))
                mask, blended = self._segment(path, image)
                self._save_mask(mask, files[0] / f"{index:06d}.png")
                write(blended)
        if write is None:
            raise DataError(f"cannot read '{path}': the video has no frames; remove it from the arguments")
        return files

    @torch.no_grad()
    def _segment(self, path: Path, image: RGB) -> tuple[Mask, RGB]:
        """Return the mask and the overlay of an image, and add its pixels to the counts."""
        prepared = prepare_image(image, self.trained.transforms)
        batch = {key: value[None] for key, value in prepared.sample.items()}
        preds = self.trained.model.val_step(batch)["preds"]
        if preds.ndim != 3:
            shape = tuple(preds.shape)
            raise ModelError(
                f"the predictions must be class ids of shape (N, H, W), but their shape is {shape}"
            )
        mask: Mask = prepared.resize_to_image(preds[0]).to(torch.uint8).numpy()
        blended = overlay(image, mask, self.palette)  # also checks the class ids
        counts = np.bincount(mask.ravel(), minlength=len(self.palette))
        self.counts[str(path)] = self.counts.get(str(path), np.zeros_like(counts)) + counts
        return mask, blended

    def _save_mask(self, mask: Mask, path: Path) -> None:
        """Write a PNG whose pixel values are class ids, and whose palette contains the class colors."""
        picture = Image.frombytes("P", (mask.shape[1], mask.shape[0]), mask.tobytes())
        picture.putpalette(np.asarray(self.palette, np.uint8).tobytes())
        _save(picture, path)


def _shares(counts: NDArray[np.int64]) -> list[float]:
    return (counts / max(counts.sum(), 1)).tolist()


def _save(picture: Image.Image, path: Path) -> None:
    with atomic_write(path) as temporary:
        picture.save(temporary, "PNG")


def _frames(path: Path, every: int) -> Iterator[tuple[int, RGB, Fraction]]:
    """Yield the index and pixels, uint8 (H, W, 3), of every `every`-th frame of a video, and its frame rate."""
    with extra("video"):
        import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = Fraction(stream.average_rate or 25)
            for index, frame in enumerate(container.decode(stream)):
                if index % every == 0:
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                    yield index, np.ascontiguousarray(pixels), rate
    except (av.FFmpegError, OSError, IndexError) as error:  # IndexError: the file contains no video
        raise DataError(f"cannot read '{path}': {error}") from error


@contextmanager
def _video_writer(path: Path, rate: Fraction) -> Iterator[Callable[[RGB], None]]:
    """Yield a function that appends a frame, uint8 (H, W, 3), to a new MP4 video. The file is written atomically."""
    import av

    with atomic_write(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream: Any = container.add_stream(codec, rate=rate)
        stream.pix_fmt = "yuv420p"

        def write(frame: RGB) -> None:
            height, width = frame.shape[:2]
            # The codec requires an even height and width.
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
            if not stream.codec_context.is_open:  # the first frame determines the size of the video
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))

        yield write
        container.mux(stream.encode())
