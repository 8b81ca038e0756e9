"""Run random programs: `python -m generated COUNT SEED JOBS`, or `python -m generated 'PROGRAM'` for one as printed."""

import collections
import concurrent.futures
import json
import os
import subprocess
import sys

from generated.programs import Program, generate

PASSED = ("ok", "refused", "invalid")


def _work(numbers):
    """Check programs in this process, and print a JSON line for each."""
    from generated.run import check, judge, quiet

    quiet()
    for number in numbers:
        print(json.dumps(dict(seed=number)), flush=True)
        program, result = check(number, most=int(os.environ.get("REDUCE", 60)))
        line = dict(
            seed=number, verdict=result.verdict, ran=result.ran, detail=result.detail, scope=program.scope
        )
        print(json.dumps(line | dict(program=str(program), full=str(generate(number)))), flush=True)
        if result.verdict == "foreign" and judge(Program()).verdict != "ok":
            return  # torch's state is damaged; another process continues


def _supervise(numbers, file):
    """Check programs in another process; start it again after a crash."""
    found = []
    while numbers:
        command = [sys.executable, "-m", "generated", "--work", *map(str, numbers)]
        started, done = None, 0
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            started = entry["seed"]
            if "verdict" in entry:
                done += 1
                found.append(entry)
                _report(entry, file)
        if process.wait() and done < len(numbers):
            entry = dict(
                seed=started, verdict="crash", ran="", scope="", detail=f"exit code {process.returncode}"
            )
            found.append(entry | dict(program=str(generate(started)), full=""))
            _report(found[-1], file)
            done += 1
        numbers = numbers[done:]
    return found


def _report(entry, file):
    print(json.dumps(entry), file=file, flush=True)
    if entry["verdict"] not in PASSED:
        print(
            f"seed {entry['seed']}: {entry['verdict']}: {entry['detail'].strip()}\n  {entry['program']}",
            flush=True,
        )


def main(arguments):
    if arguments[:1] == ["--work"]:
        _work(map(int, arguments[1:]))
        return 0
    if arguments[0].startswith("{"):
        from generated.run import judge, quiet

        quiet()
        print(judge(Program.parse(arguments[0])))
        return 0
    count, first, jobs = map(int, [*arguments, *["100", "0", "2"][len(arguments) :]])
    numbers = range(first, first + count)
    with (
        open(os.environ.get("RESULTS", os.devnull), "a") as file,  # noqa: PTH123
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        parts = pool.map(lambda job: _supervise([*numbers[job::jobs]], file), range(jobs))
        entries = [entry for part in parts for entry in part]
    for key in ("verdict", "ran"):
        print(dict(collections.Counter(entry[key] for entry in entries)))
    refusals = collections.Counter(
        e["detail"].partition("\n")[0] for e in entries if e["verdict"] == "refused"
    )
    for text, times in refusals.most_common():
        print(f"refused {times} times: {text}")
    return any(entry["verdict"] not in PASSED for entry in entries)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
