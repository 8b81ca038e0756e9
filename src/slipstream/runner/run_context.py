"""Context managers for building, training and evaluating with a Runner, and for releasing resources after a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint import get_random_state, set_random_state
from slipstream.config import add_config_path
from slipstream.errors import ConfigError
from slipstream.hooks.ema import validation_weights
from slipstream.hooks.preemption import PreemptionHook
from slipstream.logging import RUN_FAILED
from slipstream.registry import default_scope
from slipstream.speed.apply import running

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner


class RunContext:
    """Context managers for building, training and evaluating with a Runner.

    Each Runner keeps its own random state, so Runners in the same process do not affect each other's random numbers.

    Args:
        runner: the Runner.
        user_cfg: the user's configuration, used to add config paths to error messages.
        scope: the registry scope to search first.
    """

    def __init__(self, runner: Runner, user_cfg: Mapping[str, Any], scope: str) -> None:
        self._runner, self._user_cfg = runner, user_cfg
        self.scope = scope
        self._random_state: dict[str, Any] | None = None
        # Whether a run is in progress.
        self.active = False
        self._stop_reason = ""

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Context manager for the Runner's constructor; stores the random state on exit."""
        try:
            with self._building():
                yield
        except Exception as error:
            if hasattr(self._runner, "logger"):  # the log file has been opened
                self._log_error(error)
                self._runner.logger.close()
            raise
        self._random_state = get_random_state()

    def _log_error(self, error: Exception) -> None:
        """Write an error and its traceback to the log file; the caller reports it on the console."""
        # DEBUG records are written only to the log file.
        self._runner.logger.debug(f"{RUN_FAILED}{type(error).__name__}: {error}", exc_info=error)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager for a training run.

        Raises:
            ConfigError: this Runner is already running, or an earlier training run ended in the middle of an epoch.
        """
        if self.active:
            raise ConfigError(
                "train() cannot be called while this Runner is running, for example from a hook", "Runner"
            )
        with ExitStack() as stack:
            for hook in self._runner.hooks:
                if isinstance(hook, PreemptionHook):
                    stack.enter_context(hook.handle_signals())
            stack.enter_context(self.running())
            if self._stop_reason:
                raise ConfigError(
                    f"training stopped in the middle of an epoch ({self._stop_reason}), so this Runner's state is "
                    "inconsistent; create a new Runner with resume=True",
                    "Runner",
                )
            try:
                yield
            except BaseException as error:
                loop = self._runner.loops.get_if_built("train")
                # In the middle of an epoch, the loader, the gradients and the counters are not in a consistent state.
                if getattr(loop, "in_epoch", False):
                    self._stop_reason = type(error).__name__
                raise

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """Context manager for validation or testing; restores the random state on exit.

        During another run of this Runner, it also restores each module's training mode and the weights that were active
        before, even after an error.

        Yields:
            False during another run, otherwise True; see `running`.
        """
        runner = self._runner
        saved_state = get_random_state() if self.active else self._random_state
        modes = [(module, module.training) for module in runner.model.modules()]
        with self.running() as outermost:
            try:
                with nullcontext() if outermost else validation_weights(runner):
                    yield outermost
            finally:
                if not outermost:
                    runner.model.train(modes[0][1])
                    for module, training in modes:
                        module.training = training
                assert saved_state is not None
                set_random_state(saved_state)

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Activate the run's logger, message hub and options.

        On exit, even after an error, close the log files and release the hooks.

        Yields:
            False during another run of this Runner, in which case this context manager has no effect; otherwise True.
        """
        if self.active:
            yield False
            return
        self.active = True
        try:
            with self._run_outermost():
                yield True
        finally:
            self.active = False

    @contextmanager
    def _run_outermost(self) -> Iterator[None]:
        runner = self._runner
        assert self._random_state is not None
        set_random_state(self._random_state)
        runner.error = None
        if any(hook.reads_phases for hook in runner.hooks):
            runner.phases.start()
        try:
            with (
                self._building(),
                runner.logger.as_current(),
                runner.message_hub.as_current(),
                running(runner.speed, runner.device, runner.logger),
            ):
                yield
        except BaseException as error:
            runner.error = error
            if isinstance(error, Exception):
                self._log_error(error)
            raise
        finally:
            self._random_state = get_random_state()
            runner.is_training = False
            runner.phases.stop()
            self._close()

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Search the run's registry scope first and add config paths to error messages."""
        with add_config_path(self._user_cfg), default_scope(self.scope):
            yield

    def _close(self) -> None:
        """Release all resources of the run, even if releasing one of them fails."""
        runner = self._runner
        with ExitStack() as stack:  # calls the functions in reverse order
            stack.callback(runner.logger.close)
            stack.callback(runner.visualizer.end_run, failed=runner.error is not None)
            stack.callback(runner.folder_lock.release)
            stack.callback(runner.checkpoints.close)
            stack.callback(runner.loops.end_workers)
            for hook in runner.hooks:
                stack.callback(hook.release, runner)
