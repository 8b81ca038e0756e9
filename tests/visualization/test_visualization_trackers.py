import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from slipstream.errors import MissingPackageError
from slipstream.visualization import MLflowVisBackend, TrackioVisBackend, WandbVisBackend
from tiny_runs import Stop, StoppedError, run

PICTURE = np.zeros((4, 5, 3), np.uint8)


class Recorder:
    """An object that records every method call. `results` contains the return values by method name."""

    def __init__(self, **results):
        self.calls = []
        self._results = results

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self._results.get(name)

        return call

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def wandb(monkeypatch):
    module = ModuleType("wandb")
    module.inits = []
    module.run = Recorder()
    module.run.config = Recorder()
    module.init = lambda **kwargs: module.inits.append(kwargs) or module.run
    module.Image = lambda array: ("image", array.shape)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.client = Recorder(
        create_experiment="7", create_run=SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    )
    module.uris = []
    module.MlflowClient = lambda tracking_uri: module.uris.append(tracking_uri) or module.client
    entities.Metric = lambda key, value, timestamp, step: (key, value, step)
    entities.Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return module


def test_wandb_run_starts_on_first_use_with_init_kwargs(wandb, tmp_path):
    backend = WandbVisBackend(tmp_path, init_kwargs={"project": "p"}, define_metric_cfg={"val/mIoU": "max"})
    assert wandb.inits == []
    assert backend.experiment is backend.experiment is wandb.run
    assert wandb.inits == [{"dir": str(tmp_path), "project": "p"}]
    assert wandb.run.named("define_metric") == [
        (("*",), {"step_metric": "step"}),
        ((), {"name": "val/mIoU", "summary": "max", "step_metric": "step"}),
    ]


def test_wandb_logs_numbers_with_their_step_as_a_value(wandb, tmp_path):
    backend = WandbVisBackend(tmp_path, define_metric_cfg=[{"name": "loss", "summary": "min"}], commit=False)
    backend.add_scalars({"loss": np.float32(0.5), "note": "text"}, step=100)
    backend.add_scalar("val/acc", 1, step=2)  # a smaller step than the previous one
    backend.add_image("sheet", PICTURE, step=3)
    assert wandb.run.named("log") == [
        (({"loss": 0.5, "step": 100},), {"commit": False}),
        (({"val/acc": 1.0, "step": 2},), {"commit": False}),
        (({"sheet": ("image", (4, 5, 3)), "step": 3},), {"commit": False}),
    ]


@pytest.mark.parametrize(
    ("kind", "package"),
    [(WandbVisBackend, "wandb"), (MLflowVisBackend, "mlflow"), (TrackioVisBackend, "trackio")],
)
def test_missing_package_error_names_the_extra(monkeypatch, tmp_path, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    backend = kind(tmp_path)
    with pytest.raises(MissingPackageError, match=rf"pip install 'slipstream\[{package}\]'"):
        backend.add_scalar("loss", 1.0)


def test_mlflow_config_is_flattened_and_sent_in_batches_within_the_service_limits(mlflow, tmp_path):
    backend = MLflowVisBackend(tmp_path)
    backend.add_config({"hooks": [{"type": "A"}], "long": "x" * 7000, **{f"k{i}": i for i in range(150)}})
    batches = [kwargs["params"] for _, kwargs in mlflow.client.named("log_batch")]
    assert [len(batch) for batch in batches] == [100, 52]
    assert batches[0][:2] == [("hooks.0.type", "A"), ("long", "x" * 6000)]
    assert mlflow.client.named("log_text")[0][0][2] == "config.py"


@pytest.mark.parametrize(("stop", "status"), [(99, "FINISHED"), (7, "FAILED")])
def test_mlflow_run_ends_with_the_runner(mlflow, tmp_path, stop, status):
    backends = [dict(type="MLflowVisBackend", save_dir=str(tmp_path / "vis"))]
    with suppress(StoppedError):
        run(tmp_path, visualizer=dict(type="Visualizer", vis_backends=backends), custom_hooks=[Stop(stop)])
    assert mlflow.client.named("set_terminated") == [(("r1", status), {})]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="requires the package mlflow")
def test_mlflow_store_contains_the_logged_values(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    backend = MLflowVisBackend(tmp_path / "vis", "e", "n", params={"seed": 3}, tracking_uri=store)
    backend.add_config({"optim_wrapper": {"lr": 0.1}, **{f"k{i}": i for i in range(150)}})
    for step in range(3):
        backend.add_scalars({"train/loss": 1.0 / (step + 1), "text": "x"}, step)
    backend.add_image("val/sheet", PICTURE, step=2)
    (tmp_path / "vis").mkdir()
    (tmp_path / "vis" / "scalars.json").write_text("{}")
    backend.close()
    client = MlflowClient(tracking_uri=store)
    run = client.get_run(backend.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["optim_wrapper.lr"] == "0.1"
    assert run.data.params["seed"] == "3"
    assert len(run.data.params) == 152
    history = client.get_metric_history(backend.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert {f.path for f in client.list_artifacts(backend.run_id)} == {"config.py", "scalars.json", "val"}


def test_trackio_stores_the_values_of_a_run(tmp_path):
    pytest.importorskip("trackio")
    backends = [dict(type="TrackioVisBackend", init_kwargs=dict(project="tiny", name="first"))]
    code = f"""
import trackio
from tiny_runs import run
runner = run({str(tmp_path)!r}, visualizer=dict(type="Visualizer", vis_backends={backends!r}), cfg=dict(note=3))
backend = runner.visualizer.get_backend("TrackioVisBackend")
backend.add_image("sheet", __import__("numpy").zeros((4, 5, 3), "uint8"), step=2)
backend.close()
(found,) = trackio.Api().runs("tiny")
rows = trackio.SQLiteStorage.get_logs("tiny", "first")
print(found.name, [row["step"] for row in rows if "loss" in row], found.config["note"])
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "\nfirst [5, 10] 3\n" in done.stdout, done.stdout + done.stderr
