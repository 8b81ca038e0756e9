"""Tests of the greedy search with scripted trials."""

import time
from dataclasses import replace

import pytest
import torch
from fakes import FakeProcess, Script, alive

from slipstream.errors import ConfigError, NonFiniteLossError, SlipstreamError
from slipstream.tune import search as tune_search
from slipstream.tune.jobs import Setting
from slipstream.tune.options import check_names
from slipstream.tune.process import Process, TrialError
from slipstream.tune.search import Search


def search(scripts, names=("channels_last", "fused", "precision"), budget=60, speed=None, rows=None):
    """Run a search. `scripts` maps the names of the enabled options, joined by '+', to the trial's script.

    Without an entry, a trial has the script of the baseline, whose key is ''.
    """

    def make_job(setting):
        keys = [*setting.speed, *(["num_workers"] if setting.num_workers else [])]
        named = "+".join(
            sorted(key if key != "compile" else f"compile={setting.speed[key].get('scope')}" for key in keys)
        )
        return scripts.get(named, scripts.get("", Script()))

    return Search(make_job, speed, check_names(names), budget, (rows or []).append).run()


def by_label(outcome):
    return {row.label: row for row in outcome.rows}


def test_faster_options_are_combined_and_slower_ones_are_not(fake_process):
    outcome = search(
        {
            "channels_last": Script(0.08),
            "channels_last+fused": Script(0.2),
            "channels_last+precision": Script(0.05),
        }
    )
    rows = by_label(outcome)
    assert [rows[name].status for name in ("channels_last", "fused", "precision=bf16")] == [
        "adopted", "slower", "adopted",
    ]  # fmt: skip
    assert outcome.setting.speed == {"channels_last": True, "precision": "bf16"}
    assert rows["precision=bf16"].against == "channels_last"
    assert rows["precision=bf16"].estimate.ratio == pytest.approx(1.6)
    # The plan is measured again, against the baseline itself.
    assert outcome.total.ratio == pytest.approx(2.0)


def test_batches_that_workers_loaded_while_a_trial_waited_are_not_timed(fake_process):
    search({"": Script(buffered=6)}, ["fused"])
    assert {untimed for _, untimed in fake_process.requests} == {7}


class NoisyProcess(FakeProcess):
    """A process whose step times vary from round to round. The script contains the times of successive rounds."""

    def time(self, steps, untimed, seconds):
        times = self.script.seconds
        if isinstance(times, float):
            return super().time(steps, untimed, seconds)
        self.rounds = getattr(self, "rounds", -1) + 1
        return {"seconds": times[self.rounds % len(times)], "peak_mib": 100.0}

    def wait_for(self, event, seconds):
        times, self.script = self.script, replace(self.script, seconds=0.1)
        warm = super().wait_for(event, seconds)
        self.script = times
        return warm


def test_a_plan_that_is_slower_than_the_baseline_is_not_adopted(monkeypatch):
    """Each option seems faster by chance, but the final measurement shows that both together are slower."""
    monkeypatch.setattr(tune_search, "Process", NoisyProcess)
    both = Script((*[0.09] * 5, *[0.11] * 5))
    outcome = search(
        {"channels_last": Script(0.095), "channels_last+fused": both}, ["channels_last", "fused"]
    )
    assert (outcome.setting, outcome.adopted, outcome.total) == (Setting(), [], None)
    assert [row.status for row in outcome.rows] == ["inconclusive"] * 2
    reason = outcome.rows[0].reason
    assert reason == "channels_last + fused combined: 0.91 times the speed of the baseline"


def test_an_option_with_different_losses_is_rejected_even_if_it_is_faster(fake_process):
    outcome = search({"fused": Script(0.01, losses=(2.0, 1.5, 1.2))}, ["fused"])
    (row,) = outcome.rows
    assert row.status == "rejected"
    assert "losses by 0.044 (allowed: 0.02)" in row.reason
    assert outcome.setting.speed == {}


def test_low_precision_has_a_wider_tolerance(fake_process):
    losses = (2.01, 1.51, 1.0)
    assert search({"precision": Script(0.05, losses)}, ["precision"]).rows[0].status == "adopted"
    assert search({"fused": Script(0.05, losses)}, ["fused"]).rows[0].status == "rejected"


def test_options_added_to_low_precision_are_compared_with_low_precision(fake_process):
    half, compiled = (2.01, 1.51, 1.0), (2.0, 1.5, 1.0)
    scripts = {"precision": Script(0.05, half), "compile=step+precision": Script(0.02, compiled)}
    outcome = search(scripts, ["precision", "compile"])
    assert outcome.adopted == ["precision=bf16", "compile=step"]
    assert by_label(outcome)["compile=step"].loss_difference == pytest.approx((0.005, 0.0044), abs=1e-4)
    far = {**scripts, "compile=step+precision": Script(0.02, (2.2, 1.5, 1.0))}
    assert by_label(search(far, ["precision", "compile"]))["compile=step"].status == "rejected"


@pytest.mark.parametrize("status", ["out of memory", "timed out", "failed"])
def test_a_trial_without_a_result_appears_in_the_table(fake_process, status):
    outcome = search(
        {"fused": Script(error=TrialError(status, "why")), "precision": Script(0.05)}, ["fused", "precision"]
    )
    rows = by_label(outcome)
    assert (rows["fused"].status, rows["fused"].reason) == (status, "why")
    assert rows["precision=bf16"].status == "adopted"


def test_a_step_that_cannot_be_compiled_is_not_measured_as_compiled(fake_process):
    reason = "The step cannot be compiled: no C++ compiler found"
    scripts = {"compile=step": Script(0.01, problem=reason), "compile=model": Script(0.05)}
    rows = by_label(search(scripts, ["compile"]))
    assert (rows["compile=step"].status, rows["compile=step"].reason) == ("failed", reason)
    assert rows["compile=model"].status == "adopted"


def test_the_model_is_compiled_only_if_the_step_cannot_be(fake_process):
    rows = by_label(search({"compile=step": Script(0.05, compile_seconds=30)}, ["compile"], budget=600))
    assert rows["compile=step"].compile_seconds == pytest.approx(30)
    assert (rows["compile=model"].status, rows["compile=model"].reason) == (
        "skipped",
        "not needed, because compile=step works",
    )


def test_options_that_this_machine_does_not_support_are_skipped_with_the_reason(fake_process):
    rows = by_label(search({}, ["cuda_graph", "prefetch", "cudnn_benchmark"]))
    assert "requires an NVIDIA or AMD GPU" in rows["cuda_graph"].reason
    assert rows["prefetch=2"].reason == "batches are already in CPU memory"
    assert {row.status for row in rows.values()} == {"skipped"}


def test_an_option_that_the_run_sets_is_not_changed(fake_process):
    own = Script(sources={"precision": "speed.precision"})
    rows = by_label(search({"": own}, ["precision"]))
    assert rows["precision=bf16"].reason == "already set by the run (speed.precision)"


def test_interrupt_ends_all_processes_and_keeps_the_rows_measured_so_far(fake_process):
    interrupted = Script(fail_when_timed=KeyboardInterrupt())
    outcome = search({"channels_last": Script(0.05), "channels_last+fused": interrupted})
    assert outcome.stopped == "interrupted"
    assert [row.label for row in outcome.rows] == ["channels_last"]
    assert outcome.setting.speed == {"channels_last": True}
    assert outcome.baseline_seconds == pytest.approx(0.1)


def test_a_plan_whose_process_dies_ends_the_search_with_the_reason(fake_process):
    dead = TrialError("out of memory", "killed")
    outcome = search({"": Script(fail_when_timed=dead)}, ["fused"])
    assert outcome.stopped == "the process running the current plan exited: out of memory: killed"
    assert outcome.setting.speed == {}


class Steps:
    """A run whose steps take `seconds` seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def train(self, observer, folder):
        observer.describe = lambda: FakeProcess(Script()).wait_for("warm", 1)
        while True:
            time.sleep(self.seconds)
            observer.after_step(torch.tensor(1.0))


def test_a_real_trial_that_hangs_is_ended_at_the_deadline_and_appears_in_the_table(monkeypatch):
    started = []

    class Recorded(Process):
        def __init__(self, job, make_observer):
            super().__init__(job, make_observer)
            started.append(self._process.pid)

    monkeypatch.setattr("slipstream.tune.search.Process", Recorded)
    jobs = lambda setting: Steps(1000 if setting.speed else 0.001)  # noqa: E731
    outcome = Search(jobs, None, ["channels_last", "fused"], 12).run()
    assert outcome.stopped == "the time budget ran out"
    assert [row.status for row in outcome.rows] == ["timed out", "not measured"]
    assert "only 0 steps finished" in outcome.rows[0].reason
    assert len(started) == 2
    assert not any(map(alive, started))


def test_error_for_a_budget_too_short_for_one_trial_names_the_minimum(fake_process):
    with pytest.raises(
        ConfigError, match=r"^budget: 2 s is too short for one trial; the estimated minimum is \d+ s"
    ):
        search({"": Script(1.0)}, budget=2)


def test_a_baseline_that_does_not_train_raises_an_error(fake_process):
    with pytest.raises(SlipstreamError, match=r"training the baseline failed \(out of memory\): why"):
        search({"": Script(error=TrialError("out of memory", "why"))})
    with pytest.raises(NonFiniteLossError, match="losses of the baseline are not finite"):
        search({"": Script(losses=(1.0, float("inf")))})


def test_trials_that_do_not_fit_in_the_budget_are_listed_with_a_reason(fake_process, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        "slipstream.tune.search.time.monotonic", lambda: now.__setitem__(0, now[0] + 0.5) or now[0]
    )
    outcome = search({"": Script(1.0), "channels_last": Script(0.5)}, budget=36)
    rows = by_label(outcome)
    assert rows["channels_last"].status == "adopted"
    assert rows["precision=bf16"].status == "not measured"
    assert outcome.stopped == "the time budget ran out"


def test_a_mode_is_measured_only_in_combination_with_an_adopted_scope(fake_process):
    names = ["compile", "compile_mode", "compile_dynamic"]
    slower = by_label(search({"compile=step": Script(0.2), "compile=model": Script(0.2)}, names))
    assert slower["compile.mode=max-autotune-no-cudagraphs"].reason == "compile is not part of the plan"
    outcome = search({"compile=step": Script(0.05)}, names)
    rows = by_label(outcome)
    assert rows["compile.mode=max-autotune-no-cudagraphs"].against == "compile=step"
    assert rows["compile.mode=max-autotune-no-cudagraphs"].status == "no gain"
    assert "compile.dynamic=True" not in rows
    assert outcome.setting.speed == {"compile": {"scope": "step"}}


def test_dynamic_shapes_are_measured_if_the_shapes_of_the_batches_differ(fake_process):
    varying = Script(0.05, shapes=3)
    rows = by_label(search({"": Script(shapes=3), "compile=step": varying}, ["compile", "compile_dynamic"]))
    assert {rows[f"compile.dynamic={value}"].status for value in (True, False)} == {"no gain"}


def test_unknown_option_names_suggest_the_nearest():
    with pytest.raises(
        ConfigError, match=r"'chanels_last' is not an option .*; did you mean 'channels_last'\?"
    ):
        check_names(["chanels_last"])
