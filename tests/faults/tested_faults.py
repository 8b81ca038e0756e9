"""Run the tests for each kind of fault, and record the number of test cases in a table in docs/reliability.md.

Run `python tests/faults/tested_faults.py --page docs/reliability.md`. With `--results`, the script reads the JUnit
files of complete test runs (`make test` and `make matrix` with `PYTEST_ADDOPTS=--junitxml=...`) instead of running the
tests.
The random faults of `interruptions.py` and of the fuzzers have separate tables.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START, END = "<!-- tested faults: start -->", "<!-- tested faults: end -->"

ROWS: dict[tuple[str, str], tuple[str, ...]] = {
    ("checkpoints and shards with damaged bits, sectors or ends",
     "an error that identifies the file and the entry"): (
        "checkpoint/test_checkpoint_integrity.py",
        "distributed/test_two_sharded_checkpoints.py::test_flipped_bits_in_shards_raise_an_error",
        "distributed/test_two_sharded_checkpoints.py::test_shards_that_do_not_fill_a_tensor_raise_an_error",
    ),
    ("newest checkpoint or `last_checkpoint` is damaged or missing",
     "the run resumes from the newest intact checkpoint"): (
        "runner/test_runner_resume_choice.py::test_resume_uses_the_newest_intact_checkpoint",
        "runner/test_runner_resume_choice.py::test_damaged_last_checkpoint_is_skipped",
    ),
    ("SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2",
     "a checkpoint is saved; the results after resuming are bitwise identical"): (
        "test_preemption.py",
        "distributed/test_two_preemption.py",
    ),
    ("two runs in one `work_dir`", "the second run ends with an error"): (
        "runner/test_folder_lock.py::test_second_run_is_refused_until_the_first_is_killed",
        "runner/test_folder_lock.py::test_lock_waits_for_the_remaining_processes_of_a_killed_run",
    ),
    ("two `CheckpointHook`s in one run", "neither hook removes the other hook's files"): (
        "hooks/test_hooks_checkpoint.py::test_files_of_another_run_are_not_removed",
        "hooks/test_hooks_checkpoint.py::test_two_hooks_with_the_same_file_names_raise_an_error",
    ),
    ("run killed while it replaces a sharded checkpoint",
     "the previous checkpoint is kept until the new one is complete"): (
        "runner/test_folder_lock.py::test_run_removes_temporary_files_of_killed_runs",
        "distributed/test_two_sharded_checkpoints.py::test_sharded_checkpoints_are_kept_removed_and_found_like_files",
    ),
    ("run stopped within an accumulation window, in one or two processes",
     "the results after resuming are bitwise identical"): (
        "runner/test_runner_resume.py::test_gradients_of_an_unfinished_accumulation_window_are_restored",
        "distributed/test_two_preemption.py::test_signal_on_one_rank_stops_all_and_the_run_resumes_bitwise_identically",
        "distributed/test_two_sharded_checkpoints.py::test_accumulated_gradients_are_restored",
    ),
    ("`StopIteration` in a dataset, and epochs that end early",
     "an error that identifies the sample or reports both lengths"): (
        "dataset/loading/test_samples.py::test_stop_iteration_of_a_sample_does_not_end_the_epoch",
        "runner/test_runner_data_faults.py::test_stop_iteration_from_a_sample_ends_the_run_and_names_the_sample",
        "runner/test_runner_data_faults.py::test_epoch_with_fewer_batches_than_the_loaders_length_raises_an_error",
        "runner/test_runner_data_faults.py::test_short_evaluation_raises_an_error",
    ),
    ("invalid checkpoint contents", "an error that identifies the key; the run is not changed"): (
        "faults/test_faults_checkpoint_content.py",
    ),
    ("full disk", "one error that identifies the disk; the run resumes once space is available"): (
        "faults/test_faults_disk_full.py",
    ),
    ("changed configurations, files and overrides", "an error that identifies the key or the file"): (
        "faults/test_faults_fuzz.py",
    ),
    ("invalid or unknown options", "an error that starts with the key's path"): (
        "runner/test_runner_strict.py",
    ),
    ("temporary files left by killed runs", "the next run removes them; files and folders are synced"): (
        "runner/test_folder_lock.py::test_run_removes_temporary_files_of_killed_runs",
        "test_files.py",
    ),
    ("workers that hang or exit, samples that raise errors, small `/dev/shm`",
     "a warning or an error that states the cause"): (
        "dataset/loading/test_waiting.py",
        "dataset/loading/test_samples.py",
    ),
    ("batches with one sample, targets out of range, orphaned workers",
     "a warning or an error with a remedy; no worker outlives its run"): (
        "runner/test_runner_data_faults.py",
    ),
    ("secrets, paths outside the `work_dir`, YAML aliases, pickles, imports",
     "secrets are redacted; the others are rejected"): (
        "runner/test_runner_secrets.py",
        "test_redaction.py",
        "config/test_config_untrusted.py",
        "recipes/test_recipes_untrusted.py",
        "checkpoint/test_checkpoint_untrusted.py",
        "hooks/test_hooks_checkpoint.py::test_invalid_file_names_are_rejected_at_construction",
    ),
    ("non-finite losses, weights and metrics; loss spikes",
     "reported or skipped, depending on the configuration"): (
        "hooks/test_hooks_loss_spike.py",
        "hooks/test_hooks_nan_guard.py",
        "speed/test_speed_nan_guard.py",
    ),
    ("failure of one of two machines (`torchrun --nnodes=1:2`), and different numbers of processes",
     "the run continues; no sample is lost or repeated"): (
        "distributed/test_launch_elastic.py",
        "distributed/test_two_elastic.py",
    ),
}  # fmt: skip


def run(selected: Iterable[str], log: Path) -> None:
    """Run the selected tests, whose names are relative to `tests/`, and write their results to a JUnit file."""
    words = [
        "-m",
        "pytest",
        "-m",
        "not npu and not gpu",
        "-n",
        "2",
        "--dist",
        "loadscope",
        f"--junitxml={log}",
    ]
    names = [f"tests/{name}" for name in dict.fromkeys(selected)]
    environ = os.environ | {"SLIPSTREAM_CI": "1"}  # makes tests that cannot run fail instead of being skipped
    subprocess.run([sys.executable, *words, *names], cwd=ROOT, env=environ, check=False)


def outcomes(logs: Iterable[Path]) -> dict[str, Counter[str]]:
    """Return the number of passed and failed cases by file and by function, from JUnit files."""
    found: dict[str, Counter[str]] = {}
    for case in (case for log in logs for case in ElementTree.parse(log).iter("testcase")):
        path = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        name = f"{path}::{case.get('name', '').partition('[')[0]}"
        outcome = "skipped" if case.find("skipped") is not None else "passed" if len(case) == 0 else "failed"
        for key in (path, name):
            found.setdefault(key, Counter())[outcome] += 1
    return found


def markdown(found: Mapping[str, Counter[str]]) -> str:
    """Return the Markdown table of the outcomes."""
    lines = ["| fault | required result | cases tested | failed |", "|---|---|---:|---:|"]
    for (fault, required), names in ROWS.items():
        counts = sum((found.get(name, Counter()) for name in names), Counter())
        lines.append(
            f"| {fault} | {required} | {counts['passed'] + counts['failed']} | {counts['failed'] or 'none'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="page in which to replace the table")
    parser.add_argument(
        "--results", type=Path, nargs="+", help="JUnit files to read instead of running the tests"
    )
    options = parser.parse_args()
    if options.results:
        found = outcomes(options.results)
    else:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "results.xml")
            run((name for names in ROWS.values() for name in names), log)
            found = outcomes([log])
    table = markdown(found)
    print(table)
    if options.page is not None:
        text = options.page.read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        options.page.write_text(f"{before}{START}\n{table}\n{END}{after}")
    return int(any(counts["failed"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
