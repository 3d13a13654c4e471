"""What an image consists of: each layer with its size, what a change rebuilds, what is sent to the build."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from building import COMMIT, Buildah, Layer, image_name
from declared import PAGE, instructions

pytestmark = pytest.mark.images
ON_THE_PAGE = "float8_weight_only"
CODE = re.compile(r"COPY (LICENSE|src/|reports/|problems/\w+/ )")


def adding(file: Path) -> list[str]:
    """The instructions of a Dockerfile that add a layer."""
    return [line for line in instructions(file) if line.startswith(("RUN ", "COPY "))]


def listed(layers: list[Layer], checkout: Path, problem: str) -> list[tuple[str, Layer]]:
    """Each layer with the instruction that made it."""
    files = (checkout / "docker/base.Dockerfile", checkout / "problems" / problem / "Dockerfile")
    found = list(zip(["FROM", *(line for file in files for line in adding(file))], layers, strict=True))
    for line, layer in found[1:]:
        assert (" COPY " in layer.made_by) == line.startswith("COPY "), (line, layer)
    return found


def rows(layers: list[tuple[str, Layer]]) -> dict[str, int]:
    """Of the page's table: the instruction, shortened, and its bytes. A file of pins is with what it installs."""
    found: dict[str, int] = {}
    pins = 0
    for line, layer in layers:
        if line.startswith("COPY ") and not CODE.match(line):
            pins += layer.bytes
            continue
        short = re.sub(r"^(RUN apt-get|RUN python3 -m venv)\b.*", r"\1", line).replace("--no-cache-dir ", "")
        found[re.sub(r"^(COPY \S+) .*", r"\1", short)] = layer.bytes + pins
        pins = 0
    return found


def megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def needs_overlay(buildah: Buildah) -> None:
    if not buildah.layered:
        pytest.skip("no overlay file system can be mounted here, and a whole copy for each layer is too much")


@pytest.mark.usefixtures("image")
def test_every_layer_with_its_size(buildah: Buildah, problem: str, checkout: Path) -> None:
    needs_overlay(buildah)
    layers = listed(buildah.layers(image_name(problem)), checkout, problem)
    print(f"\n{problem}:", *(f"{megabytes(layer.bytes):>9}  {line[:100]}" for line, layer in layers), sep="\n")
    code = [layer.bytes for line, layer in layers if CODE.match(line)]
    pins = [layer.bytes for line, layer in layers if line.startswith("COPY ") and not CODE.match(line)]
    assert len(code) == 4
    assert sum(code) < 5_000_000
    assert pins
    assert max(pins) < 20_000
    if problem == ON_THE_PAGE:
        measured = rows(layers)
        page = PAGE.read_text()
        written = dict(re.findall(r"^\| `((?:FROM|RUN|COPY)[^`]*)`[^|]*\| ([\d.]+ [GM]B) ", page, re.M))
        table = "\n".join(f"| `{line}` | {megabytes(size)} |" for line, size in measured.items())
        assert set(written) == set(measured), f"measured:\n{table}"
        for line, size in measured.items():
            number, unit = written[line].split()
            said = float(number) * {"M": 1e6, "G": 1e9}[unit[0]]
            assert abs(said - size) <= max(0.1 * size, 1e6), f"{line}: {written[line]}; measured:\n{table}"


@pytest.fixture
def small(checkout: Path, tmp_path: Path) -> Path:
    """The checkout with one small package in the place of torch and of torchao: layers are what matters."""
    root = tmp_path / "checkout"
    shutil.copytree(checkout, root)
    (root / "requirements/base.txt").write_text("packaging==26.3\n")
    (root / "requirements/side-by-side.txt").write_text("mdurl==0.1.2\n")
    return root


def dependencies(layers: list[tuple[str, Layer]]) -> list[str]:
    """Digests of all that stands before the code."""
    return [layer.digest for line, layer in layers if not CODE.match(line)]


def build(
    buildah: Buildah, base: str, root: Path, problem: str, **arguments: str
) -> tuple[str, list[tuple[str, Layer]]]:
    """What the build says, and the layers of what it makes."""
    said = buildah.build(
        root / "problems" / problem / "Dockerfile", "localhost/small", root, "--layers", BASE=base, **arguments
    )
    return "\n".join(said), listed(buildah.layers("localhost/small"), root, problem)


def test_a_change_of_code_in_row_norms_rebuilds_no_dependency(buildah: Buildah, base: str, small: Path) -> None:
    said, first = build(buildah, base, small, "row_norms")
    assert "Successfully installed packaging" in said
    changed = ("src/worklog/__init__.py", "problems/row_norms/repro.py")
    for file in changed:
        (small / file).write_text("CHANGED = True\n")
    said, second = build(buildah, base, small, "row_norms", COMMIT=COMMIT)
    assert "Successfully installed" not in said
    assert dependencies(second) == dependencies(first)
    rebuilt = [line for (line, new), (_, old) in zip(second, first, strict=True) if new.digest != old.digest]
    assert {"COPY src/ src/", "COPY problems/row_norms/ problems/row_norms/"} <= set(rebuilt)
    container = buildah.container("localhost/small")
    for file in changed:
        assert container.sh(f"cat {file}") == "CHANGED = True\n"
    buildah("rm", container.name)


def test_row_norms_shares_torch_with_another_problem_and_not_its_own_packages(
    buildah: Buildah, base: str, small: Path
) -> None:
    needs_overlay(buildah)
    _, first = build(buildah, base, small, "row_norms")
    _, other = build(buildah, base, small, ON_THE_PAGE)
    torch = 1 + next(i for i, (line, _) in enumerate(first) if line.startswith("RUN pip install"))
    assert dependencies(other)[:torch] == dependencies(first)[:torch]
    (small / "problems/row_norms/requirements.txt").write_text("mdurl==0.1.2\n")
    said, own = build(buildah, base, small, "row_norms")
    assert "Successfully installed mdurl" in said
    assert dependencies(own)[:torch] == dependencies(first)[:torch]
    assert dependencies(own)[torch:] != dependencies(first)[torch:]


def test_the_context_is_small(buildah: Buildah, checkout: Path, tmp_path: Path) -> None:
    """What .dockerignore lets through, reports left out."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    buildah.build(tmp_path / "Dockerfile", "localhost/context:local", checkout)
    (name,) = buildah("from", "--pull-never", "localhost/context:local")
    (root,) = buildah("mount", name)
    sizes: dict[str, int] = {}
    for path in Path(root).rglob("*"):
        if path.is_file():
            top = path.relative_to(root).parts[0]
            sizes[top] = sizes.get(top, 0) + path.stat().st_size
    kept = {str(p.relative_to(root)) for p in Path(root).glob("reports/**/*") if p.is_file()}
    buildah("umount", name)
    buildah("rm", name)
    tops = {"LICENSE", "README.md", "pyproject.toml", "requirements", "scripts", "src", "problems", "reports"}
    assert set(sizes) == tops
    print(f"\ncontext in bytes: {sizes}")
    assert sum(size for top, size in sizes.items() if top != "reports") < 5_000_000
    assert {Path(name).name for name in kept} <= {"record.json"}
