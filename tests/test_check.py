"""`worklog check` finds what it promises to find, and names the place."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import checkouts
import pytest

from worklog import check, cli


def failures(root: Path, name: str | None = None) -> list[str]:
    return [str(one) for one in check.run(root, [name] if name else check.folders_of(root), cli.app)]


def edit(file: Path, old: str, new: str) -> int:
    """Replace the first `old`; returns its line."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return text[: text.index(old)].count("\n") + 1


def next_digit(digit: str) -> str:
    return str((int(digit) + 1) % 10)


def test_nothing_is_wrong_with_a_recorded_problem(checkout: Path) -> None:
    assert failures(checkout) == []
    done = checkouts.worklog(checkout, "check")
    assert (done.returncode, done.stdout) == (0, "Nothing is wrong.\n")


def test_one_digit_of_a_page(checkout: Path) -> None:
    page = checkout / "problems/row_norms/WORKLOG.md"
    text = page.read_text()
    found = re.search(r"H200: (\d)", text)
    assert found
    line = edit(page, found[0], "H200: " + next_digit(found[1]))
    (failure,) = failures(checkout)
    assert failure.startswith(f"problems/row_norms/WORKLOG.md:{line}: is ")
    done = checkouts.worklog(checkout, "check", "row_norms", "--json")
    assert done.returncode == 1
    (reported,) = json.loads(done.stdout)
    assert (reported["file"], reported["line"]) == ("problems/row_norms/WORKLOG.md", line)


def test_one_digit_of_a_figure(checkout: Path) -> None:
    figure = checkout / "problems/row_norms/figures/times.svg"
    line = edit(figure, 'viewBox="0', 'viewBox="1')
    (failure,) = failures(checkout)
    assert failure.startswith(f"problems/row_norms/figures/times.svg:{line}: ")


@pytest.mark.parametrize("field", ["median of the page", "something that no page shows"])
def test_one_digit_of_a_record(checkout: Path, field: str) -> None:
    file = checkout / "reports/row_norms" / checkouts.run_id(checkout) / "record.json"
    text = file.read_text()
    pattern = r'"samples_us": \[\s*\d+\.(\d)' if field.startswith("median") else r'"memory_bytes": (\d)'
    found = re.search(pattern, text)
    assert found
    file.write_text(text[: found.start(1)] + next_digit(found[1]) + text[found.end(1) :])
    line = text[: found.start(1)].count("\n") + 1
    place = file.relative_to(checkout)
    found_failures = failures(checkout)
    assert f"{place}:{line}: was edited after it was written (its seal does not fit its content)." in found_failures


def test_one_digit_of_a_trace(checkout: Path) -> None:
    (trace,) = checkout.glob("reports/row_norms/*profile*/torch.square_then_sum.json.gz")
    content = bytearray(trace.read_bytes())
    content[len(content) // 2] ^= 1
    trace.write_bytes(content)
    place = str(trace.relative_to(checkout))
    assert any(failure.startswith(f"{place}: is not the file") for failure in failures(checkout))


def test_one_digit_of_a_text_artifact_names_its_line(checkout: Path) -> None:
    file = checkout / "reports/row_norms" / checkouts.run_id(checkout) / "kernels.csv"
    line = edit(file, "250000", "250001")
    assert any(f.startswith(f"{file.relative_to(checkout)}:{line}: is not the file") for f in failures(checkout))


def test_a_missing_and_an_unlisted_file_of_a_run(checkout: Path) -> None:
    run = checkout / "reports/row_norms" / checkouts.run_id(checkout)
    (run / "bytes.json").unlink()
    (run / "notes.txt").write_text("by hand\n")
    found = failures(checkout)
    place = run.relative_to(checkout)
    assert f"{place}/bytes.json: is missing; {place}/record.json lists it" in found
    assert f"{place}/notes.txt: is not listed in {place}/record.json" in found


def test_a_file_and_a_problem_that_are_too_large(checkout: Path) -> None:
    run = checkout / "reports/row_norms" / checkouts.run_id(checkout)
    for index in range(5):
        (run / f"big{index}.bin").write_bytes(b"\0" * 4_500_000)
    (run / "bigger.bin").write_bytes(b"\0" * 5_000_001)
    found = failures(checkout)
    assert "reports/row_norms: holds 27.5 MB of runs; the limit is 20 MB a problem" in found
    assert any("bigger.bin: has 5.0 MB; the limit is 5 MB" in failure for failure in found)


def test_a_record_in_another_runs_folder(checkout: Path) -> None:
    run = checkout / "reports/row_norms" / checkouts.run_id(checkout)
    shutil.copytree(run, run.with_name("20260101-cpu-copied-000000"))
    (failure,) = failures(checkout)
    assert re.search(r"copied-000000/record.json:\d+: is of run .*, not of this folder's", failure)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("About 17x slower.\n", "the number 17x is typed into the prose"),
        ("{{ 17.3 }}\n", "the number 17.3 is a constant in an expression"),
        ('{{ run("20260101-cpu-none-000000").gpu }}\n', "there is no recorded run reports/row_norms/20260101"),
    ],
)
def test_a_page_that_cannot_be_rendered_names_the_templates_line(checkout: Path, added: str, message: str) -> None:
    template = checkout / "problems/row_norms/WORKLOG.md.j2"
    lines = len(template.read_text().splitlines())
    template.write_text(template.read_text() + added)
    found = failures(checkout, "row_norms")
    assert len(found) == 1
    assert found[0].startswith(f"problems/row_norms/WORKLOG.md.j2:{lines + 1}: {message}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("worklog reproduce row_norms", "worklog has no verb 'reproduce'"),
        ("worklog repro row_norms --devise cpu", "No such option"),
        ("worklog repro", "Missing argument"),
        ("worklog repro row_sums", "there is no problem 'row_sums'"),
        ("python problems/row_norms/repro.py --bogus", "No such option"),
        ("python problems/row_sums/repro.py", "there is no problems/row_sums/repro.py"),
        ("A=1 ./scripts/absent --x | tee log", "there is no ./scripts/absent"),
        ("if true; then", "bash does not parse this"),
    ],
)
def test_commands_of_a_page(checkout: Path, command: str, message: str) -> None:
    readme = checkout / "README.md"
    readme.write_text(readme.read_text() + f"\n```bash\nworklog list\n{command}\n```\n")
    lines = len(readme.read_text().splitlines())
    (failure,) = failures(checkout)
    assert message in failure
    assert re.match(rf"README.md:({lines - 2}|{lines - 1}|{lines}): ", failure)  # bash counts an open `if` at the end


def test_commands_that_are_right(checkout: Path) -> None:
    readme = checkout / "README.md"
    readme.write_text(
        readme.read_text()
        + "\n```bash\nworklog repro row_norms --variant vector_norm \\\n  --device cpu  # small\n"
        + "X=1 problems/row_norms/nsys.sh vector_norm && worklog check --json > out.json\n"
        + "python problems/row_norms/repro.py capture --variant vector_norm\nworklog new next_one\n"
        + "worklog repro next_one\nworklog --help\n```\n"
    )
    assert failures(checkout) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a](problems/none/WORKLOG.md)", "links to problems/none/WORKLOG.md, which is not there"),
        ("[a](#nowhere)", "links to #nowhere, and this page has no such heading"),
        ("[a](problems/row_norms/WORKLOG.md#nowhere)", "links to #nowhere"),
        ("`src/worklog/absent.py`", "names `src/worklog/absent.py`, which is not there"),
        ("see /home/someone/x", "holds the absolute home path /home/someone"),
        ("`docker pull registry.example.com/team/image:1`", "names the host registry.example.com"),
        ("`http://mirror.internal/simple`", "names the host mirror.internal"),
    ],
)
def test_links_files_and_private_names(checkout: Path, text: str, message: str) -> None:
    readme = checkout / "README.md"
    readme.write_text(readme.read_text() + f"\n{text}\n")
    (failure,) = failures(checkout)
    assert failure.startswith(f"README.md:{len(readme.read_text().splitlines())}: {message}")


def test_links_that_are_right(checkout: Path) -> None:
    readme = checkout / "README.md"
    readme.write_text(
        readme.read_text()
        + "\n## The `row` table, again\n\n[a](#the-row-table-again) [b](problems/row_norms/WORKLOG.md#runs) "
        + "[c](https://example.com/x:y) `problems/row_norms/repro.py` [d](LICENSE)\n"
    )
    assert failures(checkout) == []


def test_the_index_is_compared_too(checkout: Path) -> None:
    line = edit(checkout / "README.md", "claims hold", "claims held")
    (failure,) = failures(checkout)
    assert failure.startswith(f"README.md:{line}: is ")


def test_a_stale_figure(checkout: Path) -> None:
    (checkout / "problems/row_norms/figures/old.svg").write_text("<svg/>")
    (failure,) = failures(checkout)
    assert failure.startswith("problems/row_norms/figures/old.svg: is made by no page any more")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("repro.py", 'summary="baseline: ', 'summary="', "the first variant's summary, and no other, starts with"),
        ("repro.py", 'slug="vector_norm"', 'slug="Vector-Norm"', "the slug 'Vector-Norm' is not snake_case"),
        ("repro.py", 'name="cuda", device="cuda"', 'name="big", device="cpu"', "there is no config for cuda"),
        ("repro.py", "def claims", "def claim", "does not define claims"),
        ("repro.py", "def build(", "def build(:", "repro.py:50: "),
        ("analysis.ipynb", "import pandas as pd", "import pandas as", "does not parse"),
        ("README.md", "What you will learn:", "It is 17 times slower.", "the number 17 is typed into the prose"),
        ("nsys.sh", "#!/usr/bin/env bash", "", "does not start with #!"),
        ("Dockerfile", "ARG BASE", "ARG TYPER_VERSION=0.1\nARG BASE", "pins typer 0.1; requirements/base.txt:"),
        ("requirements.txt", "-r", "rich\n-r", "does not pin rich"),
        ("requirements.txt", "-r", "rich==1.0\n-r", "pins rich 1.0; requirements/base.txt:"),
    ],
)
def test_the_folder_contract(checkout: Path, file: str, old: str, new: str, message: str) -> None:
    edit(checkout / "problems/row_norms" / file, old, new)
    found = failures(checkout)
    assert any(message in failure for failure in found), found
    assert any(failure.startswith("problems/row_norms") for failure in found)


@pytest.mark.parametrize(
    "file", ["README.md", "repro.py", "nsys.sh", "analysis.ipynb", "WORKLOG.md", "requirements.txt"]
)
def test_a_file_that_every_problem_has(checkout: Path, file: str) -> None:
    (checkout / "problems/row_norms" / file).unlink()
    assert f"problems/row_norms/{file}: is missing; every problem has one" in failures(checkout)


def test_a_long_readme_and_a_script_that_cannot_run(checkout: Path) -> None:
    folder = checkout / "problems/row_norms"
    (folder / "README.md").write_text("word\n" * 41)
    (folder / "ncu.sh").chmod(0o644)
    found = failures(checkout, "row_norms")
    assert "problems/row_norms/README.md:41: has 41 lines; the limit is 40" in found
    assert "problems/row_norms/ncu.sh:1: is not executable; chmod +x problems/row_norms/ncu.sh" in found


def test_versions_env_is_compared(checkout: Path) -> None:
    (checkout / "docker").mkdir()
    (checkout / "docker/versions.env").write_text("TORCH_VERSION=1.0.0\n")
    assert any(
        "pins torch" in failure and "docker/versions.env:1 pins 1.0.0" in failure for failure in failures(checkout)
    )


def test_an_unknown_problem_is_one_sentence(checkout: Path) -> None:
    done = checkouts.worklog(checkout, "check", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "worklog: No problem 'nothing'; there are: row_norms.\n"


def test_this_repositorys_own_guide_names_what_exists() -> None:
    root = checkouts.REPOSITORY
    from worklog.check import commands, pages

    for page in (root / "CONTRIBUTING.md", root / "README.md"):
        assert [str(f) for f in [*commands.check(root, page, cli.app), *pages.links(root, page)]] == []
