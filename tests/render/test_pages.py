"""Pages out of a real run: what they print, and what they refuse."""

from __future__ import annotations

import statistics
from pathlib import Path

import checkouts
import msgspec
import pytest

from worklog import record
from worklog.render import index, pages, stale, write
from worklog.render.pages import PageError
from worklog.render.quantity import digits


@pytest.fixture
def folder(checkout: Path) -> Path:
    return checkout / "problems/row_norms"


def page(folder: Path, text: str) -> str:
    """What a template with `base` set to the recorded run gives, without the first line's note."""
    base = checkouts.run_id(folder.parent.parent)
    (folder / "WORKLOG.md.j2").write_text('{% set base = run("' + base + '") %}\n' + text)
    return pages.render(folder).text.split("\n", 1)[1].rstrip("\n")


def recorded(folder: Path) -> record.Record:
    root = folder.parent.parent
    return record.load(root / "reports/row_norms" / checkouts.run_id(root))


def test_numbers_of_a_case_are_the_records(folder: Path) -> None:
    case = recorded(folder).variants["vector_norm"].cases["rows"]
    assert case.timing
    assert case.memory
    assert case.correctness
    assert case.correctness.value is not None
    median_us = statistics.median(case.timing.samples_us)
    assert page(folder, "{{ base.vector_norm.rows.median_us | us }}") == f"{digits(median_us)} µs"
    assert page(folder, "{{ base.vector_norm.rows.median_ms | us }}") == f"{digits(median_us)} µs"
    assert (
        page(folder, '{{ base["vector_norm"]["rows"].p90_us | ms(4) }}') == f"{digits(case.timing.p90_us / 1e3, 4)} ms"
    )
    assert page(folder, "{{ base.vector_norm.rows.samples }}") == str(len(case.timing.samples_us))
    rate = case.bytes / (median_us * 1e-6) / 1e9
    assert page(folder, "{{ base.vector_norm.rows.bytes_per_s | gbps }}") == f"{digits(rate)} GB/s"
    error = f"{case.correctness.value:.1e}".replace("e-0", "e-")
    assert page(folder, "{{ base.vector_norm.rows.error | sci }}") == error
    peak = case.memory.allocated_bytes / 2**20
    assert page(folder, "{{ base.vector_norm.rows.memory.allocated_bytes | mib }}") == f"{digits(peak)} MiB"


def test_facts_claims_configs_and_the_run(folder: Path) -> None:
    found = recorded(folder)
    assert page(folder, "{{ base.vector_norm.facts.input_bytes | mib }}") == "32.0 MiB"
    assert page(folder, "{{ config.rows }} {{ configs.cpu.rows | count }} {{ base.config.rows }}") == "16384 2,048 2048"
    claim = found.claims[0]
    assert claim.measured
    assert page(folder, f'{{{{ base.claims["{claim.name}"].measured | ratio }}}}') == f"{digits(claim.measured)}x"
    text = page(folder, "{{ base.gpu }} {{ base.date }} `{{ base.commit }}` {{ command(base) }}")
    assert text == f"{found.hardware.cpu} {found.started_utc[:10]} `{checkouts.COMMIT}` {' '.join(found.argv)}"


def test_small_files_of_a_run(folder: Path) -> None:
    assert page(folder, '{{ evidence(base, "kernels.csv")[0].total_ns | ms }}') == "1.50 ms"
    assert page(folder, '{{ evidence(base.id, "kernels.csv")[1].name }}') == "multiply"
    assert page(folder, '{{ evidence(base, "bytes.json").dram.read_bytes | gib }}') == "1.00 GiB"
    assert page(folder, '{{ evidence(base, "bytes.json").dram.per_weight | plain }}') == "28.4"
    link = page(folder, '{{ artifact(base, "kernels.csv") }}')
    assert link == f"[`kernels.csv`](../../reports/row_norms/{recorded(folder).run_id}/kernels.csv)"


def test_an_edited_file_is_no_evidence(folder: Path) -> None:
    root = folder.parent.parent
    file = root / "reports/row_norms" / checkouts.run_id(root) / "kernels.csv"
    file.write_text(file.read_text().replace("3", "4"))
    with pytest.raises(PageError, match=r"WORKLOG\.md\.j2:3: .*kernels\.csv is missing or not the file"):
        page(folder, '\n{{ evidence(base, "kernels.csv")[0].count }}')


def test_citations_are_numbered_and_listed_at_the_end(folder: Path) -> None:
    text = page(folder, '{{ cite(1.5, "ms", "A") }}, {{ cite(3, "x", "B") }}, {{ cite("8 to 60", "ms", "A") }}\n\nEnd.')
    head, tail = text.split("\n\n", 1)
    assert head == "1.5 ms [[1]](#sources), 3x [[2]](#sources), 8 to 60 ms [[1]](#sources)"
    assert tail == "End.\n\n## Sources\n\n1. A\n2. B"
    assert page(folder, '{{ cite(1.5, "ms", "A") | us }}').startswith("1,500 µs [[1]](#sources)")
    placed = page(folder, '{{ cite(1.5, "ms", "A") }}\n## Read\n{{ sources() }}\nEnd.')
    assert placed.endswith("## Read\n1. A\nEnd.")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (
            'verdict(predict(30, "MiB"), q, 0.1)',
            "**confirmed**: predicted 30 MiB, measured 32.0 MiB (+7 %, allowed ±10 %)",
        ),
        (
            'verdict(predict(40, "MiB"), q, 0.1)',
            "**refuted**: predicted 40 MiB, measured 32.0 MiB (-20 %, allowed ±10 %)",
        ),
        ('verdict(predict(30, "MiB"), q, "at least")', "**confirmed**: predicted at least 30 MiB, measured 32.0 MiB"),
        ('verdict(predict(30, "MiB"), q, "at most")', "**refuted**: predicted at most 30 MiB, measured 32.0 MiB"),
        ('verdict(predict(1, "x"), q / q, 0)', "**confirmed**: predicted 1x, measured 1.00x (+0 %, allowed ±0 %)"),
        ('verdict(predict(2, "x"), none)', "**undecided**: predicted 2x, not measured"),
    ],
)
def test_verdicts(folder: Path, expression: str, text: str) -> None:
    assert page(folder, "{% set q = base.vector_norm.facts.input_bytes %}{{ " + expression + " }}") == text


def test_tables(folder: Path) -> None:
    text = page(
        folder,
        '{{ table(base.variants, {"variant": "slug", "input (MiB)": "facts.input_bytes", "n": "rows.samples", '
        '"status": "status"}) }}',
    )
    assert text == (
        "| variant         | input (MiB) |   n | status |\n"
        "|-----------------|------------:|----:|--------|\n"
        "| square_then_sum |        32.0 |  20 | ok     |\n"
        "| vector_norm     |        32.0 |  20 | ok     |"
    )
    text = page(folder, '{{ table([["a|b", none, base.vector_norm.facts.input_bytes]], ["x", "y (ms)", "z (GiB)"]) }}')
    assert text.splitlines()[2] == "| a\\|b |      - |  0.0312 |"


def test_a_failed_variant_shows_its_status_in_a_table_and_is_an_error_elsewhere(folder: Path) -> None:
    root = folder.parent.parent
    found = recorded(folder)
    broken = record.VariantResult(status="out_of_memory", message="It did not fit.")
    variants = {**found.variants, "vector_norm": broken}
    new = msgspec.structs.replace(found, variants=variants, run_id="20260101-cpu-broken-000001", artifacts=[])
    record.save(new, root / "reports/row_norms" / new.run_id)
    call = 'table(run("20260101-cpu-broken-000001").variants, {"variant": "slug", "time (ms)": "rows.median_us"})'
    assert page(folder, "{{ " + call + " }}").splitlines()[3].endswith("| out of memory |")
    with pytest.raises(PageError, match=r"has no case 'rows' \(out_of_memory: It did not fit\.\)"):
        page(folder, '{{ run("20260101-cpu-broken-000001").vector_norm.rows.median_us | ms }}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": record.Source(commit="abc", dirty=True)}, "was made from a tree in modified state"),
        ({"source": record.Source(commit=None, dirty=None)}, "was made from a tree in unknown state"),
        ({"complete": False}, "is incomplete; an interrupted run is not cited"),
    ],
)
def test_runs_that_are_not_cited(folder: Path, change: dict[str, object], message: str) -> None:
    found = msgspec.structs.replace(recorded(folder), run_id="20260101-cpu-bad-000001", artifacts=[], **change)
    record.save(found, folder.parent.parent / "reports/row_norms" / found.run_id)
    with pytest.raises(PageError, match=r"WORKLOG\.md\.j2:2: reports/row_norms/20260101-cpu-bad-000001 " + message):
        page(folder, '{{ run("20260101-cpu-bad-000001").gpu }}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ base.bf16 }}", "has no variant 'bf16'; its variants: square_then_sum, vector_norm"),
        ("{{ base.vector_norm.decode }}", "vector_norm has no case 'decode'; its cases: rows"),
        ("{{ base.vector_norm.rows.median }}", "vector_norm.rows has no 'median'; a case has: bytes, "),
        ("{{ base.vector_norm.rows.median_us }}", "a number in µs needs a filter"),
        ("{{ base.vector_norm.rows.median_us | gib }}", "µs cannot be printed as GiB"),
        ("{{ base.vector_norm.rows.median_us | round(2) }}", "drops a number's unit and origin"),
        ("{{ base.vector_norm.rows.fraction | percent }}", "measured no copy_bytes_per_s"),
        ("{{ base.vector_norm.rows.energy.joules_per_call | joules }}", "has no energy measurement"),
        ("{{ base.vector_norm.rows.memory.device_bytes | gib }}", "the record has no such value"),
        ("{{ base }}", "this prints a whole Run"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{{ config.nothing }}", "no attribute 'nothing'"),
        ("{{ base.__class__ }}", "unsafe"),
        ("{{ base.folder.unlink() }}", "has no variant 'folder'"),
        ('{{ artifact(base, "none.txt") }}', "lists no artifact 'none.txt'; it lists: stdout.log"),
        ("{% if %}", "Expected an expression"),
        (
            "{{ figure('Bad Slug', stacked({'a': {'b': base.vector_norm.rows.median_us}}), 'c') }}",
            "a slug has small letters",
        ),
        ("{{ figure('a', stacked({'a': {'b': 3}}), 'c') }}", "3 comes from no record"),
        ("{{ table([['a']], ['x', 'y']) }}", "a row has 1 cells under 2 columns"),
    ],
)
def test_errors_name_the_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(PageError) as caught:
        page(folder, "\n" + text)
    assert str(caught.value).startswith("problems/row_norms/WORKLOG.md.j2:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profiled_time_is_no_result(folder: Path) -> None:
    found = recorded(folder)
    case = found.variants["vector_norm"].cases["rows"]
    assert case.timing
    profiled = msgspec.structs.replace(case, timing=msgspec.structs.replace(case.timing, profiled=True))
    variant = msgspec.structs.replace(found.variants["vector_norm"], cases={"rows": profiled})
    new = msgspec.structs.replace(
        found, run_id="20260101-cpu-p-000001", artifacts=[], variants={"vector_norm": variant}
    )
    record.save(new, folder.parent.parent / "reports/row_norms" / new.run_id)
    with pytest.raises(PageError, match="timed under a profiler"):
        page(folder, '{{ run("20260101-cpu-p-000001").vector_norm.rows.median_us | ms }}')


def test_rendering_twice_gives_the_same_bytes_and_stale_files_are_found(checkout: Path, folder: Path) -> None:
    assert stale(checkout, ["row_norms"]) == {}
    template = folder / "WORKLOG.md.j2"
    template.write_text(template.read_text().replace('figure("times"', 'figure("call"'))
    changed = stale(checkout, ["row_norms"])
    names = {str(file.relative_to(folder)): content for file, content in changed.items()}
    assert set(names) == {"WORKLOG.md", "figures/call.svg", "figures/times.svg"}
    assert names["figures/times.svg"] is None
    write(changed)
    assert stale(checkout, ["row_norms"]) == {}
    assert not (folder / "figures/times.svg").exists()


def test_the_command_compares_or_writes(checkout: Path, folder: Path) -> None:
    (folder / "WORKLOG.md").write_text("old\n")
    compared = checkouts.worklog(checkout, "render", "row_norms", "--check")
    assert (compared.returncode, compared.stdout) == (1, "problems/row_norms/WORKLOG.md\n")
    assert (folder / "WORKLOG.md").read_text() == "old\n"
    assert checkouts.worklog(checkout, "render", "row_norms").returncode == 0
    again = checkouts.worklog(checkout, "render", "--check", "--json")
    assert (again.returncode, again.stdout) == (0, "[]\n")
    (folder / "WORKLOG.md.j2").write_text("17\n")
    refused = checkouts.worklog(checkout, "render", "row_norms")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("worklog: problems/row_norms/WORKLOG.md.j2:1: the number 17 ")


def test_a_readme_may_be_a_template_too(folder: Path, checkout: Path) -> None:
    base = checkouts.run_id(checkout)
    (folder / "README.md.j2").write_text('It has {{ run("' + base + '").vector_norm.rows.samples }} samples.\n')
    made, files = pages.outputs(folder)
    assert [one.target.name for one in made] == ["README.md", "WORKLOG.md"]
    assert files[folder / "README.md"].decode().endswith("It has 20 samples.\n")


def test_the_index(checkout: Path) -> None:
    row = next(line for line in (checkout / "README.md").read_text().splitlines() if "row_norms" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "[`row_norms`](problems/row_norms/WORKLOG.md)"
    assert cells[2].startswith("vector_norm is ")
    assert cells[3] == "CPU only"
    assert cells[4].startswith("1 of 1 claims hold, ")
    (checkout / "README.md").write_text("no markers\n")
    with pytest.raises(PageError, match="lacks the markers"):
        index.readme(checkout, {})
