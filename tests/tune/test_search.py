"""Tests of the greedy search with scripted trials."""

import shlex
import time
from dataclasses import replace

import pytest
import torch
from fakes import FakeProcess, Script, alive

from slipstream.config import Config
from slipstream.errors import ConfigError, NonFiniteLossError, SlipstreamError
from slipstream.tune import search as tune_search
from slipstream.tune.jobs import Setting
from slipstream.tune.options import check_names
from slipstream.tune.process import Process, TrialError
from slipstream.tune.search import Search, _launch_hint


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
    assert not outcome.total_is_product
    assert outcome.total.ratio == pytest.approx(2.0)


def test_all_rounds_contain_only_complete_accumulation_windows(fake_process):
    search({"": Script(accumulate=4)}, ["fused"])
    assert fake_process.requests
    assert all(steps % 4 == 0 for steps, _ in fake_process.requests)


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


@pytest.mark.parametrize(
    ("seconds", "status", "reason"),
    [
        # 16 of 24 rounds are faster; at least 17 would have to be faster for the 90% confidence interval to exclude 1.
        (
            (0.13, 0.09, 0.09),
            "adopted",
            "probably faster: after 24 rounds, the confidence interval still includes 1",
        ),
        ((0.13, 0.09), "inconclusive", ""),
    ],
)
def test_option_that_is_likely_faster_is_adopted(monkeypatch, seconds, status, reason):
    monkeypatch.setattr(tune_search, "Process", NoisyProcess)
    outcome = search({"fused": Script(seconds)}, ["fused"], budget=600)
    assert (outcome.rows[0].status, outcome.rows[0].reason) == (status, reason)
    assert outcome.adopted == (["fused"] if status == "adopted" else [])


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
    assert reason.startswith(
        "channels_last + fused combined: 0.91 times the speed of the baseline (0.91 to 0.91 in "
    )


def test_no_option_is_adopted_if_none_is_faster(fake_process):
    outcome = search({"channels_last": Script(0.0999)})
    assert outcome.setting.speed == {}
    assert outcome.total is None
    assert {row.status for row in outcome.rows} == {"no gain"}


def test_an_option_with_different_losses_is_rejected_even_if_it_is_faster(fake_process):
    outcome = search({"fused": Script(0.01, losses=(2.0, 1.5, 1.2))}, ["fused"])
    (row,) = outcome.rows
    assert row.status == "rejected"
    assert "the mean of 3 losses by 0.044 (allowed: 0.02)" in row.reason
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


def test_a_budget_that_ends_during_a_round_does_not_count_as_a_failure_of_the_plan(fake_process):
    late = TrialError("timed out", "no measurement in 0 s")
    outcome = search({"": Script(fail_when_timed=late), "fused": Script()}, ["fused"])
    assert outcome.rows[0].status == "not measured"
    assert outcome.rows[0].reason == "the time budget ran out during a round"


def test_nan_losses_are_rejected(fake_process):
    assert (
        search({"precision": Script(0.01, (2.0, float("nan")))}, ["precision"]).rows[0].status == "rejected"
    )


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
            started.append(self.pid)

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


def test_error_reports_a_step_longer_than_the_budget(fake_process):
    late = TrialError("timed out", "")
    with pytest.raises(
        ConfigError, match=r"the baseline finished 0 of 6 steps within this time; it needs at least 240 s"
    ):
        search({"": Script(error=late)})
    some = TrialError("timed out", "", (30.0, 12.0, 12.0))
    with pytest.raises(ConfigError, match=r"finished 3 of 6 steps within this time; it needs about 684 s"):
        search({"": Script(error=some)})


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
    assert "this trial needs about" in rows["precision=bf16"].reason
    assert outcome.stopped == "the time budget ran out"


@pytest.mark.parametrize("budget", [40, 60, 100, 300, 1000])
def test_a_search_ends_within_its_budget_and_records_the_trial_that_hangs(clocked_process, budget):
    scripts = {
        "": Script(0.2, startup=5),
        "channels_last": Script(0.1, startup=5),
        "channels_last+fused": Script(0.15, startup=5),
        "channels_last+compile=step": Script(0.05, startup=10**6),
    }
    outcome = search(scripts, ["channels_last", "fused", "precision", "compile"], budget)
    assert outcome.seconds <= budget
    assert clocked_process.now[0] <= budget
    rows = by_label(outcome)
    begun = [row.label for row in outcome.rows if row.status not in ("not measured", "skipped")]
    # Only the compilation is stopped at the deadline, because its time is not known in advance.
    assert clocked_process.hung == (
        [scripts["channels_last+compile=step"]] if "compile=step" in begun else []
    )
    if "compile=step" in begun:
        assert rows["compile=step"].status == "timed out"
        assert rows["compile=model"].status == "not measured"
    if budget >= 300:
        assert begun == ["channels_last", "fused", "precision=bf16", "compile=step"]


def test_the_time_for_ending_processes_is_part_of_the_budget(clocked_process):
    clocked_process.end_seconds = 6.0
    names = ["channels_last", "fused", "precision"]
    assert search({"": Script(0.2, startup=5)}, names, 110).seconds <= 110


def test_a_measured_compilation_is_not_repeated_if_it_cannot_end_within_the_budget(clocked_process):
    compiled = Script(0.3, startup=100, compile_seconds=100)
    scripts = {"": Script(0.2, startup=2), "compile=step": compiled, "compile=model": compiled}
    broken = {
        **scripts,
        "compile=step": Script(0.3, startup=100, compile_seconds=100, losses=(9.0, 9.0, 9.0)),
    }
    outcome = search(broken, ["compile"], 200)
    rows = by_label(outcome)
    assert rows["compile=step"].status == "rejected"
    assert rows["compile=model"].status == "not measured"
    assert "this trial needs about 1" in rows["compile=model"].reason
    assert clocked_process.hung == []


@pytest.mark.parametrize(
    ("script", "stopped"),
    [
        (Script(error=TrialError("timed out", "6 steps")), "the time budget ran out"),
        (Script(error=TrialError("failed", "why")), ""),
        (Script(), ""),
    ],
)
def test_a_search_that_the_budget_ended_early_is_not_complete(fake_process, script, stopped):
    assert search({"fused": script}, ["fused"]).stopped == stopped


def test_a_mode_is_measured_only_in_combination_with_an_adopted_scope(fake_process):
    names = ["compile", "compile_mode", "compile_dynamic"]
    slower = by_label(search({"compile=step": Script(0.2), "compile=model": Script(0.2)}, names))
    assert slower["compile.mode=max-autotune-no-cudagraphs"].reason == "compile is not part of the plan"
    outcome = search({"compile=step": Script(0.05)}, names)
    rows = by_label(outcome)
    assert rows["compile.mode=max-autotune-no-cudagraphs"].against == "compile=step"
    assert rows["compile.mode=max-autotune-no-cudagraphs"].status == "no gain"
    assert rows["compile.dynamic=True"].reason == "all measured batches have the same shape"
    assert outcome.setting.speed == {"compile": {"scope": "step"}}


def test_dynamic_shapes_are_measured_if_the_shapes_of_the_batches_differ(fake_process):
    varying = Script(0.05, shapes=3)
    rows = by_label(search({"": Script(shapes=3), "compile=step": varying}, ["compile", "compile_dynamic"]))
    assert {rows[f"compile.dynamic={value}"].status for value in (True, False)} == {"no gain"}


def test_single_compile_options_are_combined():
    scope = Setting({"compile": {"scope": "step"}, "fused": True})
    mode = Setting({"compile": {"mode": "default"}})
    assert scope.merge(mode).speed == {"compile": {"scope": "step", "mode": "default"}, "fused": True}


def test_accumulation_is_timed_for_the_samples_of_one_baseline_batch(fake_process):
    # Two half batches take 0.16 s, and the mean of their losses is the loss of the whole batch.
    halves = Script(0.08, losses=(1.9, 2.1, 1.4, 1.6, 0.9, 1.1))
    outcome = search({"": Script(0.2), "accumulate": halves}, ["accumulate"])
    (row,) = outcome.rows
    assert row.status == "adopted"
    assert row.estimate.ratio == pytest.approx(0.2 / 0.16)
    assert row.step_seconds == pytest.approx(0.16)
    assert row.loss_difference == pytest.approx((0, 0), abs=1e-12)
    assert (outcome.setting.speed, outcome.setting.batch_size) == ({"accumulate": 2}, 4)
    other = Script(0.08, losses=(1.9, 2.2, 1.4, 1.6, 0.9, 1.1))
    assert search({"": Script(0.2), "accumulate": other}, ["accumulate"]).rows[0].status == "rejected"


def test_data_parallelism_is_reported_with_its_command_but_not_adopted(fake_process, monkeypatch):
    monkeypatch.setattr("slipstream.tune.options.cores", lambda: 4)
    scripts = {"": Script(0.2), "parallel+sync_bn": Script(0.1)}
    outcome = search(scripts, ["data_parallel"])
    (row,) = outcome.rows
    assert (row.label, row.status) == ("parallel=ddp, 2 processes", "faster")
    assert row.estimate.ratio == pytest.approx(2.0)
    assert "--nproc 2 speed.parallel=ddp speed.sync_bn=true train_dataloader.batch_size=4" in row.reason
    assert (outcome.setting, outcome.adopted, outcome.total) == (Setting(), [], None)
    scripts = {"": Script(0.2), "fused": Script(0.15), "fused+parallel+sync_bn": Script(0.1)}
    _, row = search(scripts, ["fused", "data_parallel"]).rows
    assert row.against == "fused"
    assert "--nproc 2 speed.fused=true speed.parallel=ddp" in row.reason


def test_the_command_for_data_parallelism_contains_the_compared_plan():
    plan = Setting({"fused": True, "compile": {"scope": "step"}}, num_workers=2)
    trial = Setting({"parallel": "ddp", "sync_bn": True}, batch_size=4, processes=2)
    *_, command = _launch_hint(plan.merge(trial), "auto").partition("slipstream train ... ")
    words = shlex.split(command)
    assert words[:2] == ["--nproc", "2"]
    cfg = Config(dict(speed="auto", train_dataloader=dict(batch_size=8, num_workers=0)))
    cfg.merge_from_args(words[2:])
    assert cfg.to_dict() == {
        "speed": {
            "auto": True,
            "fused": True,
            "compile": {"scope": "step"},
            "parallel": "ddp",
            "sync_bn": True,
        },
        "train_dataloader": {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    }


@pytest.mark.parametrize(
    ("count", "size", "reason"),
    [(1, 8, "requires at least two cores"), (4, 7, "requires a batch size that is divisible by 2, not 7")],
)
def test_data_parallelism_is_skipped_if_it_is_not_possible(fake_process, monkeypatch, count, size, reason):
    monkeypatch.setattr("slipstream.tune.options.cores", lambda: count)
    (row,) = search({"": Script(batch_size=size)}, ["data_parallel"]).rows
    assert (row.status, row.reason) == ("skipped", reason)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(batch_size=5), "requires an even batch size, not 5"),
        (Script(batch_size=None), "requires batches that can be divided into smaller batches"),
        (
            Script(counts_steps=True),
            "the run length, the epoch length or the learning rate schedule is specified in steps",
        ),
        (Script(sources={"accumulate": "speed.accumulate"}), "already set by the run"),
    ],
)
def test_accumulation_that_would_change_the_run_is_skipped(fake_process, script, reason):
    (row,) = search({"": script}, ["accumulate"]).rows
    assert row.status == "skipped"
    assert row.reason.startswith(reason)


def test_data_parallelism_divides_the_baseline_batches():
    assert check_names(["accumulate", "data_parallel"]) == ["data_parallel", "accumulate"]


def test_unknown_option_names_suggest_the_nearest():
    with pytest.raises(
        ConfigError, match=r"'chanels_last' is not an option .*; did you mean 'channels_last'\?"
    ):
        check_names(["chanels_last"])


def test_at_least_one_name_is_required():
    with pytest.raises(ConfigError, match=r"options: is empty; choose from num_workers, .*omit it"):
        check_names([])


def test_names_are_measured_in_a_fixed_order():
    assert check_names(["compile", "fused"]) == ["fused", "compile"]
