"""A small checkout with a problem that was really run, for the tests of render, check and new."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from worklog import record

REPOSITORY = Path(__file__).resolve().parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MARKERS = "# A checkout\n\n<!-- begin:problems -->\n<!-- end:problems -->\n"

PAGE = """\
{% set base = run("RUN") %}
{% set seen = base.square_then_sum.rows.median_us / base.vector_norm.rows.median_us %}
{% set result %}vector_norm is {{ seen | ratio }} faster{% endset %}
# {{ title }}, {{ seen | ratio }}

Each of {{ config.rows | count }} rows, on bf16 parts of an H200: {{ base.vector_norm.rows.median_us | ms }}.

{{ table(base.variants, {"variant": "slug", "time (ms)": "rows.median_us", "error": "rows.error | sci"}) }}

Others saw {{ cite(142.44, "ms", "a README, RTX 4090") }}. We predict {{ predict(3, "x") }}.
Verdict: {{ verdict(predict(1, "x"), seen, "at least") }}.

```bash
worklog repro row_norms --variant vector_norm
```

{{ figure("times", stacked({"vector_norm": {"all": base.vector_norm.rows.median_us}}, "ms"), "Time of a call.") }}

{{ artifact(base, "kernels.csv") }}

## Runs

{{ runs() }}
"""


def environment(root: Path) -> dict[str, str]:
    return {
        **os.environ,
        "WORKLOG_ROOT": str(root),
        "WORKLOG_COMMIT": COMMIT,
        "WORKLOG_DIRTY": "0",
        "PYTHONPATH": str(REPOSITORY / "src"),
    }


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "worklog.cli", *words]


def worklog(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as a person would."""
    return subprocess.run(argv(*words), cwd=root, env=environment(root), capture_output=True, text=True, timeout=120)


def empty(root: Path) -> Path:
    """A checkout without problems."""
    for folder in ("problems", "reports"):
        (root / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(REPOSITORY / name, root)
    shutil.copytree(REPOSITORY / "requirements", root / "requirements", ignore=shutil.ignore_patterns("side-by-side*"))
    (root / "README.md").write_text(MARKERS)
    return root


def recorded(root: Path) -> Path:
    """A checkout with the problem row_norms, a CPU run of it, a page that cites the run, and all of it committed."""
    empty(root)
    assert worklog(root, "new", "row_norms").returncode == 0
    made = worklog(
        root, "repro", "row_norms", "--device", "cpu", "--step", "baseline", "--out", "reports/row_norms", "--json"
    )
    run_id = json.loads(made.stdout)["run_id"]
    _add_evidence(root / "reports" / "row_norms" / run_id)
    traced = worklog(
        root, "profile", "row_norms", "--with", "torch", "--config", "cpu", "--out", "reports/row_norms", "--json"
    )
    assert traced.returncode == 0, traced.stderr
    (root / "problems" / "row_norms" / "WORKLOG.md.j2").write_text(PAGE.replace("RUN", run_id))
    rendered = worklog(root, "render")
    assert rendered.returncode == 0, rendered.stderr
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def _add_evidence(folder: Path) -> None:
    """Two small files beside the run, listed in its record as a capture would list them."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerows([["name", "count", "total_ns"], ["reduce", 3, 1500000], ["multiply", 1, 250000]])
    (folder / "kernels.csv").write_text(table.getvalue())
    (folder / "bytes.json").write_text(json.dumps({"dram": {"read_bytes": 2**30, "per_weight": 28.4}, "note": "x"}))
    old = record.load(folder)
    added = [record.artifact(folder, folder / name) for name in ("kernels.csv", "bytes.json")]
    record.save(msgspec.structs.replace(old, artifacts=[*old.artifacts, *added]), folder)


def run_id(root: Path) -> str:
    (folder,) = (root / "reports" / "row_norms").glob("*-baseline-*")
    return folder.name
