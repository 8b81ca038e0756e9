import copy
import io
import logging
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.logging import MMLogger, build_logger, print_log

LINE = r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d - %s - %s"


def test_console_line_is_plain_and_unwrapped_without_a_terminal(capsys):
    text = "loss [red]" + "x" * 200
    build_logger("a").info(text)
    out = capsys.readouterr().out
    assert re.fullmatch(LINE % ("INFO", re.escape(text)) + "\n", out)


def test_terminal_line_is_colored_and_unwrapped(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    build_logger("a").warning("[bold]" + "x" * 200)
    out = capsys.readouterr().out
    assert "\x1b[33mWARNING\x1b[0m" in out
    assert "[bold]" + "x" * 200 in out
    assert out.count("\n") == 1


def test_file_contains_every_level_and_console_only_its_own(tmp_path, capsys):
    log_file = tmp_path / "run" / "a.log"
    logger = build_logger("a", log_file, level="warning")
    logger.debug("one")
    logger.warning("two")
    logger.close()
    assert "one" not in (out := capsys.readouterr().out)
    assert "two" in out
    first, second = log_file.read_text().splitlines()
    assert re.fullmatch(LINE % ("DEBUG", "one"), first)
    assert re.fullmatch(LINE % ("WARNING", "two"), second)


def test_other_ranks_print_only_errors(capsys):
    logger = build_logger("a", rank=1)
    logger.warning("quiet")
    logger.error("loud")
    out = capsys.readouterr().out
    assert "loud" in out
    assert "quiet" not in out


def test_loggers_with_the_same_name_are_independent(tmp_path, capsys):
    first, second = build_logger("a", tmp_path / "1.log"), build_logger("a", tmp_path / "2.log")
    first.info("only first")
    assert first is not second
    assert capsys.readouterr().out.count("only first") == 1
    assert (tmp_path / "2.log").read_text() == ""
    assert "a" not in logging.Logger.manager.loggerDict
    first.close()
    second.close()


def test_logger_can_be_copied_and_pickled(tmp_path, capsys):
    logger = build_logger("a", tmp_path / "a.log", rank=2)
    for twin in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert (twin.name, twin.rank) == ("a", 2)
        twin.error("from the twin")
    logger.close()
    assert capsys.readouterr().out.count("from the twin") == 2
    assert (tmp_path / "a.log").read_text() == ""


def test_current_logger_is_the_innermost_and_ends_with_its_block():
    outer, inner = build_logger("outer"), build_logger("inner")
    with outer.as_current():
        with inner.as_current():
            assert MMLogger.get_current_instance() is inner
            with outer.as_current():
                assert MMLogger.get_current_instance() is outer
        assert MMLogger.get_current_instance() is outer
    assert MMLogger.get_current_instance() not in (outer, inner)


def test_threads_have_separate_current_loggers():
    with build_logger("a").as_current() as logger, ThreadPoolExecutor(1) as pool:
        assert pool.submit(MMLogger.get_current_instance).result() is not logger


def test_print_log_accepts_each_kind_of_mmengine_logger(capsys):
    logger = build_logger("named")
    with logger.as_current():
        print_log("to print")
        print_log("to current", "current", logging.WARNING)
        print_log("to name", "named")
        print_log("to nobody", "silent")
        print_log("to logger", logger)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "to print"
    assert [line.split(" - ", 1)[1] for line in lines[1:]] == [
        "WARNING - to current",
        "INFO - to name",
        "INFO - to logger",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires /dev/full")
def test_log_file_on_a_full_disk_is_reported_once(capsys):
    logger = build_logger("a", "/dev/full")
    for _ in range(3):
        logger.info("a line")
    logger.close()
    captured = capsys.readouterr()
    assert captured.out.count("a line") == 3
    assert (
        captured.out.count("The log file /dev/full cannot be written: [Errno 28] No space left on device")
        == 1
    )
    assert "Traceback" not in captured.err


class _ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError
