"""Results of `network.predict`: class ids, class names and visualizations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.extras import extra
from slipstream.visualization import overlay

RGB = NDArray[np.uint8]


@dataclass(frozen=True)
class ClassificationPrediction:
    """The most likely class of an image, and its softmax probability."""

    confidence: float
    label: int
    image_shape: tuple[int, int]


@dataclass(frozen=True)
class SegmentationPrediction:
    """The class id of each pixel, int64 (H, W)."""

    segmentation_map: NDArray[np.int64]
    image_shape: tuple[int, int]

    @property
    def segmentation_map_shape(self) -> tuple[int, int]:
        """The height and width of the map, which are the same as those of the image."""
        return self.image_shape


@dataclass(frozen=True)
class ImagePrediction(ABC):
    """The prediction for an image.

    Attributes:
        image: the image, uint8 (H, W, 3) RGB.
        class_names: names of the classes.
    """

    image: RGB
    prediction: Any
    class_names: Sequence[str]

    @abstractmethod
    def draw(self) -> RGB:
        """Return a visualization of the prediction, uint8 (H, W, 3) RGB."""

    def show(self) -> None:
        """Open the visualization in the system's image viewer."""
        _picture(self.draw()).show()

    def save(self, output_path: str | Path) -> None:
        """Save the visualization to a file. The file extension determines the format."""
        _picture(self.draw()).save(output_path)


@dataclass(frozen=True)
class ImageClassificationPrediction(ImagePrediction):
    """The predicted class of an image."""

    prediction: ClassificationPrediction

    @property
    def class_name(self) -> str:
        """The name of the predicted class."""
        return self.class_names[self.prediction.label]

    def draw(self) -> RGB:
        """Return the image with the class name and its probability on a line below the image."""
        with extra("images"):
            from PIL import Image, ImageDraw, ImageFont

        text = f"{self.class_name} {self.prediction.confidence:.3f}"
        font: Any = ImageFont.load_default(14)
        height, width = self.image.shape[:2]
        picture = Image.new("RGB", (max(width, int(font.getlength(text)) + 8), height + 22), (255, 255, 255))
        picture.paste(Image.fromarray(self.image), (0, 0))
        ImageDraw.Draw(picture).text((4, height + 16), text, (0, 0, 0), font, anchor="ls")
        return np.asarray(picture)


@dataclass(frozen=True)
class ImageSegmentationPrediction(ImagePrediction):
    """The predicted class of each pixel of an image."""

    prediction: SegmentationPrediction
    palette: Sequence[Sequence[int]]

    def draw(self, alpha: float = 0.6) -> RGB:
        """Return the image blended with the class colors. `alpha` is the weight of the class colors."""
        return overlay(self.image, self.prediction.segmentation_map, self.palette, alpha)


@dataclass(frozen=True)
class ImagesPredictions:
    """The predictions for several images, in the order of the images."""

    predictions: tuple[ImagePrediction, ...]

    def __len__(self) -> int:
        return len(self.predictions)

    def __getitem__(self, index: int) -> ImagePrediction:
        return self.predictions[index]

    def __iter__(self) -> Iterator[ImagePrediction]:
        return iter(self.predictions)

    def show(self) -> None:
        """Open all visualizations; see `ImagePrediction.show`."""
        for prediction in self:
            prediction.show()

    def save(self, output_folder: str | Path) -> None:
        """Save the visualizations as `pred_0.jpg`, `pred_1.jpg` and so on in a folder.

        The folder is created if necessary.
        """
        folder = Path(output_folder)
        folder.mkdir(parents=True, exist_ok=True)
        for index, prediction in enumerate(self):
            prediction.save(folder / f"pred_{index}.jpg")


def _picture(pixels: RGB) -> Any:
    with extra("images"):
        from PIL import Image

    return Image.fromarray(pixels)
