"""`Visualizer`, which draws annotations on an image with matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from slipstream.openmmlab.mmengine.registry import VISUALIZERS
from slipstream.openmmlab.mmengine.utils.manager import ManagerMixin
from slipstream.openmmlab.mmengine.visualization.utils import (
    color_str2rgb,
    color_val_matplotlib,
    img_from_canvas,
    tensor2ndarray,
)
from slipstream.visualization import Visualizer as OwnVisualizer

__all__ = ["Visualizer"]

Image = npt.NDArray[np.uint8]


@VISUALIZERS.register_module()
class Visualizer(OwnVisualizer, ManagerMixin):
    """Draw on an image, and pass scalars, images and the configuration to all visualization backends.

    The most recently created visualizer, which may be an instance of a subclass, is the current instance. `set_image`
    sets the image, methods whose names start with `draw_` draw on it, and `get_image` returns the result.

    Args:
        name: name of the instance.
        image: an RGB image, uint8 (H, W, 3).
        vis_backends: the backends or their configurations.
        save_dir: parent folder of the backends' files; if it is not set, backend configurations without their own
            `save_dir` are omitted.
        fig_save_cfg: options for matplotlib's figure.
        fig_show_cfg: has no effect.
    """

    def __init__(
        self,
        name: str = "visualizer",
        image: Image | None = None,
        vis_backends: Any = None,
        save_dir: str | None = None,
        fig_save_cfg: Mapping[str, Any] | None = None,
        fig_show_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        OwnVisualizer.__init__(self, name, _usable_backends(vis_backends, save_dir), save_dir)
        ManagerMixin.__init__(self, name)
        self.fig_save_cfg = {"frameon": False} if fig_save_cfg is None else dict(fig_save_cfg)
        self.dataset_meta: Mapping[str, Any] | None = None
        self._image: Image | None = None
        self.width = self.height = 0
        self._default_font_size = 10.0
        if image is not None:
            self.set_image(image)
        # Add the instance to both dicts, so that `Visualizer.get_current_instance` can return instances of subclasses.
        for instances in (type(self)._instance_dict, Visualizer._instance_dict):
            instances.pop(name, None)
            instances[name] = self

    @property
    def _vis_backends(self) -> dict[str, Any]:
        return self._backends

    # ---- the image -------------------------------------------------------------------------------------

    @cached_property
    def fig_save(self) -> Any:
        """The figure on which this visualizer draws; created on first use, because matplotlib is slow to import."""
        from matplotlib.figure import Figure

        figure = Figure(**self.fig_save_cfg)
        figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
        figure.add_subplot().axis("off")
        return figure

    @cached_property
    def fig_save_canvas(self) -> Any:
        """The canvas of the figure."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        return FigureCanvasAgg(self.fig_save)

    @property
    def ax_save(self) -> Any:
        """The axes of the figure."""
        return self.fig_save.axes[0]

    def set_image(self, image: Image) -> None:
        """Set the image to draw on, RGB (H, W, 3) or grayscale (H, W)."""
        assert image is not None, "image must be an array, not None"
        self._image = image.astype(np.uint8)
        self.height, self.width = image.shape[:2]
        self._default_font_size = max(np.sqrt(self.height * self.width) // 90, 10)
        dpi = self.fig_save.get_dpi()
        # The additional 0.01 prevents matplotlib from rounding the size down.
        self.fig_save.set_size_inches((self.width + 0.01) / dpi, (self.height + 0.01) / dpi)
        self.ax_save.cla()
        self.ax_save.axis("off")
        self._show(self._image)

    def _show(self, image: Image) -> None:
        self.ax_save.imshow(
            image, extent=(0, self.width, self.height, 0), interpolation="none", cmap="gray", vmin=0, vmax=255
        )

    def get_image(self) -> Image:
        """Return the RGB image (H, W, 3), including everything drawn on it."""
        assert self._image is not None, "the visualizer has no image; call set_image first"
        return img_from_canvas(self.fig_save_canvas)

    def show(
        self, drawn_img: Image | None = None, win_name: str = "image", wait_time: float = 0.0, **kwargs: Any
    ) -> None:
        """Show an image in a matplotlib window for `wait_time` seconds (0: until the window is closed)."""
        from matplotlib import pyplot

        figure = pyplot.figure(win_name)
        figure.add_axes((0, 0, 1, 1)).axis("off")
        figure.axes[0].imshow(self.get_image() if drawn_img is None else drawn_img)
        if wait_time:
            pyplot.pause(wait_time)
        else:
            pyplot.show()
        pyplot.close(figure)

    def add_datasample(self, name: str, image: Image, data_sample: Any = None, **kwargs: Any) -> None:
        """Draw a data sample. OpenMMLab libraries implement this method in subclasses."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement add_datasample; use a subclass that implements it"
        )

    def add_image(self, name: str, image: Image, step: int = 0, **kwargs: Any) -> None:
        """Store an image in all backends."""
        super().add_image(name, image, step)

    # ---- shapes ----------------------------------------------------------------------------------------

    def draw_points(
        self, positions: Any, colors: Any = "g", marker: str | None = None, sizes: Any = None
    ) -> Self:
        """Draw points (N, 2)."""
        points = tensor2ndarray(positions).reshape(-1, 2)
        size = None if sizes is None else tensor2ndarray(sizes)
        self.ax_save.scatter(*points.T, c=color_val_matplotlib(colors), s=size, marker=marker)
        return self

    def draw_texts(
        self,
        texts: str | list[str],
        positions: Any,
        font_sizes: Any = None,
        colors: Any = "g",
        vertical_alignments: str | list[str] = "top",
        horizontal_alignments: str | list[str] = "left",
        font_families: str | list[str] = "sans-serif",
        bboxes: Any = None,
        font_properties: Any = None,
    ) -> Self:
        """Draw texts at positions (N, 2). All other arguments are single values or lists of N values."""
        lines = [texts] if isinstance(texts, str) else texts
        points = tensor2ndarray(positions).reshape(-1, 2)
        assert len(points) == len(lines), (
            f"there are {len(lines)} texts, but {len(points)} positions; pass one position per text"
        )
        options = {
            "size": self._default_font_size if font_sizes is None else font_sizes,
            "color": color_val_matplotlib(colors),
            "verticalalignment": vertical_alignments,
            "horizontalalignment": horizontal_alignments,
            "family": font_families,
            "bbox": bboxes,
            "fontproperties": font_properties,
        }
        for i, (x, y) in enumerate(points):
            text_options = {
                key: value[i] if isinstance(value, list) else value for key, value in options.items()
            }
            self.ax_save.text(x, y, lines[i], **text_options)
        return self

    def draw_lines(
        self, x_datas: Any, y_datas: Any, colors: Any = "g", line_styles: Any = "-", line_widths: Any = 2
    ) -> Self:
        """Draw N line segments; `x_datas` and `y_datas` (N, 2) contain the coordinates of their end points."""
        from matplotlib.collections import LineCollection

        ends = np.stack([tensor2ndarray(v).reshape(-1, 2) for v in (x_datas, y_datas)], axis=-1)
        self.ax_save.add_collection(
            LineCollection(
                list(ends),
                colors=color_val_matplotlib(colors),
                linestyles=line_styles,
                linewidths=line_widths,
            )
        )
        return self

    def draw_circles(self, center: Any, radius: Any, **options: Any) -> Self:
        """Draw circles with centers (N, 2) and radii (N,); see `draw_polygons` for the options."""
        angles = np.linspace(0, 2 * np.pi, 65)[:-1]
        unit = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        centers, radii = tensor2ndarray(center).reshape(-1, 2), tensor2ndarray(radius).reshape(-1)
        return self.draw_polygons([c + r * unit for c, r in zip(centers, radii, strict=True)], **options)

    def draw_bboxes(self, bboxes: Any, **options: Any) -> Self:
        """Draw boxes (N, 4) with the corners (x1, y1) and (x2, y2); see `draw_polygons` for the options."""
        boxes = tensor2ndarray(bboxes).reshape(-1, 4)
        assert (boxes[:, :2] <= boxes[:, 2:]).all(), "a box must have x1 <= x2 and y1 <= y2"
        return self.draw_polygons(list(boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)), **options)

    def draw_polygons(
        self,
        polygons: Any,
        edge_colors: Any = "g",
        line_styles: Any = "-",
        line_widths: Any = 2,
        face_colors: Any = "none",
        alpha: float = 0.8,
    ) -> Self:
        """Draw one polygon (M, 2), or a list of polygons."""
        from matplotlib.collections import PolyCollection

        shapes = [tensor2ndarray(p) for p in (polygons if isinstance(polygons, list) else [polygons])]
        assert all(shape.shape[1] == 2 for shape in shapes), "a polygon must have shape (M, 2)"
        widths = line_widths if isinstance(line_widths, list) else [line_widths] * len(shapes)
        self.ax_save.add_collection(
            PolyCollection(
                shapes,
                alpha=alpha,
                facecolor=color_val_matplotlib(face_colors),
                edgecolors=color_val_matplotlib(edge_colors),
                linestyles=line_styles,
                linewidths=[min(max(width, 1), self._default_font_size / 4) for width in widths],
            )
        )
        return self

    def draw_binary_masks(
        self, binary_masks: Any, colors: Any = "g", alphas: float | list[float] = 0.8
    ) -> Self:
        """Color the pixels of bool masks (N, H, W) or (H, W)."""
        masks = tensor2ndarray(binary_masks)
        assert masks.dtype == np.bool_, f"masks must have dtype bool, not {masks.dtype}"
        masks = masks[None] if masks.ndim == 2 else masks
        picture = self.get_image().astype(np.float32)
        assert masks.shape[1:] == picture.shape[:2], (
            "the masks and the image must have the same height and width"
        )
        for i, mask in enumerate(masks):
            color = colors[i] if isinstance(colors, list) else colors
            rgb = color_str2rgb(color) if isinstance(color, str) else color
            alpha = alphas[i] if isinstance(alphas, list) else alphas
            picture[mask] = (1 - alpha) * picture[mask] + alpha * np.array(rgb, dtype=np.float32)
        self._show(np.rint(picture).astype(np.uint8))
        return self

    @staticmethod
    def draw_featmap(
        featmap: torch.Tensor,
        overlaid_image: Image | None = None,
        channel_reduction: str | None = "squeeze_mean",
        topk: int = 20,
        arrangement: tuple[int, int] = (4, 5),
        resize_shape: tuple[int, int] | None = None,
        alpha: float = 0.5,
    ) -> Image:
        """Return an RGB image of a feature map (C, H, W), optionally blended with another image.

        Args:
            featmap: the feature map.
            overlaid_image: an RGB image; the feature map is resized to match it.
            channel_reduction: `squeeze_mean` (mean of the channels), `select_max` (the channel with the largest sum),
                or None for a grid of the channels with the largest sums.
            topk: number of channels in the grid.
            arrangement: numbers of rows and columns in the grid.
            resize_shape: height and width of the image of each channel.
            alpha: weight of the feature map in the blend.
        """
        maps = featmap.detach().cpu().float()
        size = resize_shape or (None if overlaid_image is None else overlaid_image.shape[:2])
        if size is not None:
            maps = F.interpolate(maps[None], size, mode="bilinear", align_corners=False)[0]
        order = maps.sum(dim=(1, 2)).argsort(descending=True)
        if channel_reduction == "squeeze_mean":
            return _heat(maps.mean(0), overlaid_image, alpha)
        if channel_reduction == "select_max":
            return _heat(maps[order[0]], overlaid_image, alpha)
        rows, columns = arrangement
        assert rows * columns >= topk, f"arrangement={arrangement} must have at least topk={topk} cells"
        tiles = [_heat(maps[i], overlaid_image, alpha) for i in order[: topk if topk > 0 else 1]]
        tiles += [np.zeros_like(tiles[0])] * (rows * columns - len(tiles))
        return np.concatenate(
            [np.concatenate(tiles[row * columns : (row + 1) * columns], axis=1) for row in range(rows)]
        )


def _heat(values: torch.Tensor, image: Image | None, alpha: float) -> Image:
    from matplotlib import colormaps

    low, high = values.min(), values.max()
    scaled = (values - low) / (high - low).clamp_min(torch.finfo(values.dtype).tiny)
    heat = np.asarray(colormaps["jet"](scaled.numpy()))[..., :3] * 255
    blended = heat if image is None else alpha * heat + (1 - alpha) * image
    return np.rint(blended).astype(np.uint8)


def _usable_backends(backends: Any, save_dir: str | None) -> list[Any]:
    """Return the backends. If `save_dir` is None, omit configurations without a `save_dir`, and issue a warning."""
    specs = list(backends) if isinstance(backends, list | tuple) else [backends]
    if save_dir is not None:
        return specs
    usable = [b for b in specs if not isinstance(b, Mapping) or b.get("save_dir") is not None]
    if omitted := [str(b.get("type")) for b in specs if isinstance(b, Mapping) and b not in usable]:
        warnings.warn(
            f"the visualizer has no save_dir, so these backends are not used: {', '.join(omitted)}; set save_dir",
            stacklevel=4,
        )
    return usable
