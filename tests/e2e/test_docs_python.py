"""Test that every Python block in the README and in docs/ runs as printed.

The blocks of a page run in one process, each in a separate namespace. On a page with the comment
`<!-- python: in order -->`, they share one namespace. `<!-- not run: REASON -->` directly before the fence excludes a
block.
"""

import functools
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from doc_pages import IN_ORDER, ROOT, Block, blocks, text_of

from forked_python import ForkedPython

BLOCKS = [block for block in blocks("python") if not block.page.startswith("docs/zh/")]
"""Blocks of the English pages. The Chinese pages contain the same blocks."""
SECONDS = 300  # time limit in seconds for all blocks of a page
DRIVER = """
import json, sys, traceback
job = json.load(open(sys.argv[1]))
shared = {"__name__": "__main__"}
for block in job["blocks"]:
    names = shared if job["in_order"] else {"__name__": "__main__"}
    try:
        for code in (job["before"], block["text"], job["after"] if block is job["blocks"][-1] else ""):
            exec(compile(code, block["id"], "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    else:
        error = ""
    with open(sys.argv[2], "a") as out:
        out.write(json.dumps({"id": block["id"], "error": error}) + "\\n")
    if error and job["in_order"]:
        break
"""
RECORD_IMAGES = """
import torch
seen = []
torch.nn.modules.module.register_module_forward_pre_hook(lambda _, args: seen.append(args[0]))
"""
"""Code that records the inputs of a page's networks."""
SHORT_ROUNDS = """
from slipstream.tune import search
search._MAX_ROUND_SECONDS, search._ROUNDS_FRACTION = 0.02, 0.0
"""
"""Code that shortens the measurements of trials."""
BEFORE = {"docs/data.md": RECORD_IMAGES, "docs/tune.md": SHORT_ROUNDS}
"""Code that runs before each block of a page."""
ENVIRONMENT = {"docs/from_mmengine.md": {"TORCH_COMPILE_DISABLE": "1"}}
"""Environment variables of a page's process. Compilation is disabled because Inductor takes about a minute."""
AFTER = {
    "docs/cross_validation.md": "assert len(scores) == 4 and all(50 < score <= 100 for score in scores)\n",
    "docs/fine_tuning.md": """
pretrained = torch.load("pretrained.pth")["state_dict"]
states = [torch.load(f"runs/tuned/epoch_{epoch}.pth")["state_dict"] for epoch in (2, 3)]
for name in ("stem.0.weight", "stem.1.running_mean"):
    assert [torch.equal(state[name], pretrained[name]) for state in states] == [True, False], name
assert not torch.equal(states[0]["body.0.weight"], pretrained["body.0.weight"])
groups = runner.optim_wrapper.param_groups
assert sorted({round(group["lr"], 6) for group in groups}) == [1e-4, 3e-4, 1e-3]
""",
    "docs/metrics.md": """
assert sorted(metrics) == ["MulticlassF1Score", "acc", "all/micro", "each/0", "each/1"]
assert metrics["acc"] == hub.get_scalar("val/acc").current()
assert abs(metrics["acc"] - (metrics["each/0"] + metrics["each/1"]) / 2) < 1e-6
assert hub.get_info("best_score/MulticlassF1Score") >= metrics["MulticlassF1Score"]
""",
    "docs/sweep.md": "assert study.best_value == min(trial.value for trial in study.trials) < 0.7\n",
    "docs/mixup.md": "assert runner.val()['accuracy/top1'] > 50\n",
    "docs/own_loop.md": "assert param_scheduler['by_epoch'] is False\n",
    "docs/data.md": """
images = [image for image in seen if image.shape[1] == 3]
assert all(image.dtype == torch.float32 and 0.2 < image.max() <= 1 for image in images)
first, second = torch.cat(images[:2]), torch.cat(images[2:])
assert sorted(first.mean((1, 2, 3)).tolist()) != sorted(second.mean((1, 2, 3)).tolist())
assert log["loss"].isfinite()
""",
    "docs/trainer.md": """
from pathlib import Path
validated, tested = history[-1]["IoU"], trainer.test(test_loader=data)["IoU"]
assert validated > 0.8, "the IoU is too close to 0.33, the IoU of random predictions"
assert abs(tested - validated) < 1e-6
files = {path.name for path in Path("checkpoints/my_experiment").iterdir()}
assert {"ckpt_latest.pth", "ckpt_best.pth", "average_model.pth"} <= files
""",
    "docs/from_mmengine.md": """
assert {"precision", "compile", "ema", "channels_last"} <= set(runner.speed.sources), runner.speed.sources
""",
}
"""Code that runs after the last block of a page, in that block's namespace, and checks the page's claims."""


@functools.cache
def errors(page: str, python: ForkedPython) -> dict[str, str]:
    """Run the blocks of a page. For each block id, return the traceback, or '' if the block succeeded."""
    chosen = [block for block in BLOCKS if block.page == page and block.runs]
    with tempfile.TemporaryDirectory(prefix="slipstream-docs-") as folder:
        job, results = Path(folder, "job.json"), Path(folder, "results.jsonl")
        job.write_text(
            json.dumps(
                {
                    "blocks": [{"id": str(block), "text": block.text} for block in chosen],
                    "in_order": IN_ORDER in text_of(page),
                    "before": BEFORE.get(page, ""),
                    "after": AFTER.get(page, ""),
                }
            )
        )
        results.touch()
        work = Path(folder, "work")
        work.mkdir()
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        done = python.run(
            *("-c", DRIVER, str(job), str(results)),
            cwd=work,
            environ={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "SLIPSTREAM_CACHE": folder}
            | ENVIRONMENT.get(page, {}),
            timeout=SECONDS,
        )
        found = [json.loads(line) for line in results.read_text().splitlines()]
    ran = {result["id"]: result["error"] for result in found}
    if done.returncode:
        ran.setdefault(str(chosen[-1]), "")
        ran[str(chosen[-1])] += f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    return ran


def _marks(block):
    return [pytest.mark.slow] if block.page == "README.md" else []  # compiles a step with inductor


@pytest.mark.parametrize("block", [pytest.param(b, marks=_marks(b), id=str(b)) for b in BLOCKS])
def test_every_python_block_runs(block: Block, python: ForkedPython):
    if not block.runs:
        assert re.fullmatch(r"not run: \S.{7,}", block.comment), f"{block}: the comment lacks a reason"
        compile(block.text, str(block), "exec")
        return
    ran = errors(block.page, python)
    assert str(block) in ran, f"{block} did not run"
    assert not ran[str(block)], ran[str(block)]


def test_pages_with_checks_exist():
    pages = {block.page for block in BLOCKS}
    assert {*BEFORE, *AFTER} <= pages


@pytest.mark.parametrize("page", ["docs/start.md", "docs/from_mmengine.md", "docs/distributed.md"])
def test_both_languages_show_the_same_code(page):
    chinese = page.replace("docs/", "docs/zh/")
    own, other = ([(b.language, b.text) for b in blocks(page=name)] for name in (page, chinese))
    english = iter(own)
    assert all(
        block in english for block in other
    )  # a subsequence; the Chinese page may refer to the English one
    headings = [re.findall(r"^#+ ", text_of(name), re.MULTILINE) for name in (page, chinese)]
    assert headings[0] == headings[1]
