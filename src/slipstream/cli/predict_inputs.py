"""Find images and videos for `slipstream predict`, and read and write videos."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.extras import extra
from slipstream.files import atomic_write

__all__ = ["TABLE", "Input", "find_inputs", "frame_rate", "frames", "video_writer"]

RGB = NDArray[np.uint8]
TABLE = "classes.csv"
"""Name of the file with the class shares, which is in every output folder."""

_IMAGES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")
_DEFAULT_RATE = 25  # frames per second, for videos that do not specify their frame rate


class Input(NamedTuple):
    """An image or video, and the path of its output files without their suffixes, relative to `--out`."""

    path: Path
    stem: Path

    @property
    def is_video(self) -> bool:
        """Whether the file is a video, according to its name."""
        return self.path.suffix.lower() in _VIDEOS


def find_inputs(names: Sequence[str], out: Path) -> list[Input]:
    """Return the files that the names refer to, without duplicates.

    A name is a file, a folder, or a pattern such as `photos/*.jpg` (for shells that do not expand patterns). A folder
    stands for all images and videos in it and in its subfolders, and the output files are written to subfolders with
    the same names. For a pattern, these are the subfolders of the folder before its first wildcard. If a folder
    contains the output folder `out`, the files in `out` are excluded, and so are files written by earlier calls.

    Raises:
        DataError: a folder or pattern matches no file, `out` contains a folder, or two files would have the same output
            files.
    """
    inputs: dict[Path, Input] = {}
    for name in names:
        if not (found := list(_match(name, out.resolve()))):
            raise DataError(
                f"{name} matches no image or video, or only results of `predict`; check the pattern"
            )
        for item in found:
            first = inputs.setdefault(item.stem, item)
            if first.path != item.path:
                raise DataError(
                    f"{first.path} and {item.path} have the same output files; process them separately, with "
                    "patterns such as FOLDER/*.jpg and different `--out` folders"
                )
    return list(inputs.values())


def _match(name: str, out: Path, root: Path | None = None) -> Iterator[Input]:
    """Yield the inputs that a name or pattern matches; output paths are relative to `root`, by default the folder."""
    path = Path(name)
    if path.is_dir() and (out == path.resolve() or out in path.resolve().parents):
        raise DataError(f"the output folder {out} contains the folder {name}; choose a different `--out`")
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in _IMAGES + _VIDEOS and p.is_file()]
        files = [p for p in files if out not in p.resolve().parents and not _is_prediction(p)]
        if not files and root is None:
            raise DataError(
                f"the folder {name} contains no images or videos; supported suffixes are "
                f"{', '.join(_IMAGES + _VIDEOS)}"
            )
        yield from (Input(p, p.relative_to(root or path).with_suffix("")) for p in files)
    elif glob.has_magic(name) and not path.exists():
        if not (matches := sorted(glob.glob(name, recursive=True))):  # noqa: PTH207  (Path.glob rejects absolute patterns)
            raise DataError(f"no file matches {name}; check the pattern")
        base = _without_pattern(path)
        for match in matches:
            inside = out in (Path(match).resolve(), *Path(match).resolve().parents)
            if inside or _is_prediction(Path(match)):
                continue
            if Path(match).is_dir():
                yield from _match(match, out, base)
            else:
                yield Input(Path(match), Path(match).relative_to(base).with_suffix(""))
    else:
        yield Input(path, Path(path.stem))


def _is_prediction(path: Path) -> bool:
    """Return whether `predict` wrote this file, in an earlier call with another output folder."""
    is_named = path.stem.endswith(("_mask", "_overlay")) or path.parent.name.endswith("_mask")
    return is_named and path.suffix in (".png", ".mp4") and any(map(_has_table, path.parents))


def _has_table(folder: Path) -> bool:
    try:
        with (folder / TABLE).open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith("file,")
    except OSError:
        return False


def _without_pattern(path: Path) -> Path:
    """Return the part of a path before its first component with a pattern."""
    return next(folder for folder in path.parents if not glob.has_magic(str(folder)))


def frames(path: Path, every: int = 1) -> Iterator[tuple[int, RGB]]:
    """Yield the index and pixels, uint8 (H, W, 3), of every `every`-th frame of a video, rotated for display.

    Raises:
        MissingPackageError: PyAV is not installed.
        DataError: the video cannot be read.
    """
    with _open(path) as container:
        if not container.streams.video:
            raise DataError(f"cannot read '{path}': the file contains no video; remove it from the arguments")
        for index, frame in enumerate(container.decode(container.streams.video[0])):
            if index % every == 0:
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                yield index, np.ascontiguousarray(pixels)


def frame_rate(path: Path) -> Fraction:
    """Return the frame rate of a video in frames per second."""
    with _open(path) as container:
        rate = container.streams.video[0].average_rate if container.streams.video else None
        return Fraction(rate or _DEFAULT_RATE)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    with extra("video"):
        import av

    try:
        with av.open(str(path)) as container:
            yield container
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error


@contextmanager
def video_writer(path: Path, rate: Fraction) -> Iterator[Callable[[RGB], None]]:
    """Yield a function that appends a frame, uint8 (H, W, 3), to a new MP4 video. The file is written atomically."""
    with extra("video"):
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
