"""The content of a wheel and an sdist: the modules of the tree, and no leftovers of an earlier build."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from trioengine import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ("trioengine", "docs", "tests", "README.md", "pyproject.toml", ".gitignore")


@pytest.fixture
def tree(tmp_path):
    """A copy of the checkout in which an older version was built."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    for stale in ("build/lib/trioengine/deleted.py", "trioengine/__pycache__/deleted.cpython-311.pyc"):
        (copy / stale).parent.mkdir(parents=True, exist_ok=True)
        (copy / stale).write_text("raise SystemExit('a module of an older version')\n")
    return copy


def modules():
    """Every file of the package, as the wheel names it."""
    files = (path for path in (ROOT / "trioengine").rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def python(*arguments, cwd):
    subprocess.run([sys.executable, *arguments], cwd=cwd, check=True, capture_output=True, timeout=300)


def wheel_of(tree, place):
    """The names in the wheel that pip builds of a tree, with the build backend that is installed here."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    python("-m", "pip", "wheel", *options, "-w", str(place), ".", cwd=tree)
    (wheel,) = place.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def of_the_package(names):
    return {name for name in names if name.startswith("trioengine/")}


def test_a_wheel_has_the_modules_of_the_tree(tree, tmp_path):
    names = wheel_of(tree, tmp_path)
    assert of_the_package(names) == modules()
    assert {name.partition("/")[0] for name in names - modules()} == {
        f"trioengine-{__version__}.{kind}" for kind in ("data", "dist-info")
    }
    headers = ("attention", "decoder", "dot", "floats", "integers", "lanes", "products", "rows", "weight")
    files = ("native.cpp", "attention.cpp", *(f"{header}.h" for header in headers))
    sources = {f"trioengine/worker/kernels/{name}" for name in files}
    assert {"trioengine/py.typed", *sources} <= names


def test_the_page_that_the_systemd_unit_names_is_installed(tree, tmp_path):
    """The unit's virtual environment is /opt/trioengine."""
    unit = (ROOT / "docs" / "trioengine.service").read_text()
    (page,) = re.findall(r"^Documentation=file:/opt/trioengine/(.*)$", unit, re.MULTILINE)
    assert f"trioengine-{__version__}.data/data/{page}" in wheel_of(tree, tmp_path)


def test_an_sdist_has_enough_to_build_and_test(tree, tmp_path):
    python("-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path), cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("trioengine-*/")
    for name in SOURCES:
        assert (unpacked / name).exists(), name
    assert not (unpacked / "build").exists()
    assert of_the_package(wheel_of(unpacked, tmp_path)) == modules()


def test_an_editable_install_leads_to_the_tree(tree, tmp_path):
    hook = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    python("-c", hook, str(tmp_path), cwd=tree)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(tree)
