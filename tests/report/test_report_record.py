"""Tests of writing and reading the contents of `report.json`."""

import json

import pytest
from records import record

from slipstream.errors import DataError
from slipstream.report import RunRecord
from slipstream.report.record import Compute, Example, LoadingRate, TunedOptions


def measured():
    return record(
        compute=Compute(1.5e9, 9.89e14, 8, "bf16", "a data sheet", ""),
        examples=[Example("cat", "dog", 0.75, "iVBO"), Example("cat", "cat", None, "iVBO")],
        loading_rates=[LoadingRate(0, 10.5), LoadingRate(4, 30.25)],
        tuned=[TunedOptions(["fused", "compile=step"], 1.5, 1.25, 1.75, True)],
    )


def test_measurements_and_examples_are_read_as_they_were_written():
    text = json.dumps(measured().to_json(), allow_nan=False)
    assert RunRecord.from_json(json.loads(text), "report.json") == measured()


def test_report_from_an_earlier_version_is_read_without_measurements():
    data = record().to_json()
    for name in ("compute", "examples", "loading_rates", "tuned"):
        del data[name]
    assert RunRecord.from_json(data, "report.json") == record()


@pytest.mark.parametrize(
    ("section", "key", "value", "path"),
    [
        ("compute", "peak_flops", -1.0, "compute.peak_flops"),
        ("compute", "devices", "two", "compute.devices"),
        ("examples", "probability", 1.5, r"examples\[0\].probability"),
        ("examples", "picture", None, r"examples\[0\].picture"),
        ("loading_rates", "num_workers", 0.5, r"loading_rates\[0\].num_workers"),
        ("tuned", "adopted", "fused", r"tuned\[0\].adopted"),
        ("tuned", "ratio", "fast", r"tuned\[0\].ratio"),
    ],
)
def test_error_names_an_invalid_value(section, key, value, path):
    data = measured().to_json()
    part = data[section] if section == "compute" else data[section][0]
    part[key] = value
    with pytest.raises(DataError, match=path):
        RunRecord.from_json(data, "report.json")
