"""`BaseLoop`, the base class of the training, validation and test loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.waiting import Loading
from slipstream.dataset.loading.workers import end_workers
from slipstream.dist import get_rank

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = ["BaseLoop", "Loadable"]

Loadable = DataLoader[Any] | Mapping[str, Any] | Sequence[Any]


class BaseLoop:
    """A loop over a data loader.

    Args:
        runner: the Runner that owns the loop.
        dataloader: a loader or its configuration.
    """

    mode = "train"
    _loading: Loading | None = None
    """The current pass over the loader."""

    def __init__(self, runner: Runner, dataloader: Loadable) -> None:
        self._runner = runner
        loader = build_dataloader(dataloader, runner.seed, self._name, training=self.mode == "train")
        self.dataloader = runner.limits.apply(loader, self.mode, self._name)

    @property
    def runner(self) -> Runner:
        """The Runner that owns this loop."""
        return self._runner

    @property
    def _name(self) -> str:
        """Name of the Runner argument that specifies the loader."""
        return f"{self.mode}_dataloader"

    def run(self) -> Any:
        """Run the whole loop."""
        raise NotImplementedError

    def _load(self, epoch: int = 0) -> Loading:
        """Start a pass over the loader. The random numbers of its workers depend only on (seed, epoch)."""
        if self._loading is not None:
            self._loading.close()
        self._loading = Loading(self.dataloader, self._name, self._warn_of_stall, (self._runner.seed, epoch))
        return self._loading

    def _warn_of_stall(self, text: str) -> None:
        if get_rank() == 0:
            self._runner.logger.warning(text)
        else:  # log an error, because ranks other than 0 print only errors
            self._runner.logger.error(f"Rank {get_rank()}: {text}")

    def end_loading(self) -> None:
        """Stop all worker processes of the loader."""
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        end_workers(self.dataloader)
