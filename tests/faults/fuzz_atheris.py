"""Read YAML, JSON and TOML configurations and overrides that atheris (libFuzzer) generates, guided by code coverage.

Run `pip install atheris`, and then `python tests/faults/fuzz_atheris.py -max_total_time=600` with src/ in PYTHONPATH.
The script accepts libFuzzer's arguments. It ends with a traceback at the first input that raises an error other than a
SlipstreamError, or an error that does not name the file or the overridden key. It also ends if a configuration changes
when it is written and read again. libFuzzer writes the input to a file named `crash-...`.
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import atheris

with atheris.instrument_imports(
    include=["slipstream.config", "slipstream.typecheck", "slipstream.files", "yaml"]
):
    from slipstream.config import Config
    from slipstream.config.override import parse_override

from faults.fuzz_files import BASE, FILES, SPLICES, VALUES
from slipstream.errors import SlipstreamError

NAMES = (
    "config.yaml",
    "config.json",
    "config.toml",
)  # Python files are left out, because they can execute any code
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_atheris_"))


def test_one_input(data: bytes) -> None:
    """Try one input: the first byte selects a file format or an override, and the rest is the text."""
    if not data:
        return
    kind, text = data[0] % (len(NAMES) + 1), data[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind < len(NAMES):
            read_file(NAMES[kind], text)
        else:
            read_override(text.decode("utf-8", "surrogateescape"))


def read_file(name: str, text: bytes) -> None:
    """Read a file. An error must name the file or its base. Without an error, a dumped copy must be equal."""
    path = FOLDER / name
    path.write_bytes(text)
    try:
        config = Config.fromfile(path)
    except SlipstreamError as error:
        if not any(known in str(error) for known in (name, "base.yaml")):
            raise AssertionError("the error does not name the file") from error
        return
    copy = FOLDER / "again.yaml"
    config.dump(copy, secrets=True)
    values, again = config.to_dict(), Config.fromfile(copy).to_dict()
    if not equal(values, again):
        raise AssertionError(f"{values!r} became {again!r}")


def equal(one: Any, other: Any) -> bool:
    """Return whether two configurations are equal. A tuple equals a list, as YAML has no tuples. NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def read_override(text: str) -> None:
    """Parse an override. An error must contain the key."""
    try:
        parse_override(text)
    except SlipstreamError as error:
        key = text.partition("=")[0].strip()
        if key not in str(error) and repr(key)[1:-1] not in str(error):
            raise AssertionError("the error does not name the key") from error


def corpus(folder: Path) -> None:
    """Write the initial inputs."""
    texts = [(NAMES.index(name), text) for name, text in FILES.items() if name in NAMES]
    texts += [(0, splice) for splice in SPLICES]
    texts += [(len(NAMES), f"{key}={value}") for key in ("a", "a.b", "a.0.b", "", "~a") for value in VALUES]
    for number, (kind, text) in enumerate(texts):
        (folder / str(number)).write_bytes(bytes([kind]) + text.encode("utf-8", "surrogatepass"))


def main() -> None:
    (FOLDER / "base.yaml").write_text(BASE)
    (FOLDER / "corpus").mkdir()
    corpus(FOLDER / "corpus")
    options = ["-max_len=600", "-timeout=20", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], str(FOLDER / "corpus"), *options, *sys.argv[1:]], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
