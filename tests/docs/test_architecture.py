"""The pages about the structure name the files and the members that exist, and the life of a request visits them."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import trio.testing

from trioengine import SamplingParams
from trioengine.testing.simulation import simulated_engine

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trioengine"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
ASIDE = {"actors/incarnation.py"}  # a PONG that comes meanwhile


def section(first, last):
    """Return the part of the page between two of its lines."""
    return ARCHITECTURE.partition(first)[2].partition(last)[0]


# ---- members of classes ---------------------------------------------------------------------------------------------


def members(definition):
    """Return the names that a class defines: methods, fields, and attributes that its methods set."""
    names = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def classes():
    """Return the members of the package's classes by the name of the class; classes of one name are taken together."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= members(node)
    return found


@pytest.mark.parametrize("page", ["architecture.md", "flows.md", "lifecycle.md", "contributing.md"])
def test_members_that_pages_name_exist(page):
    known = classes()
    named = set(re.findall(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)", (ROOT / "docs" / page).read_text()))
    assert {(owner, name) for owner, name in named if name not in known[owner]} == set()


# ---- files ----------------------------------------------------------------------------------------------------------


def has_content(path):
    """Return whether a module holds more than a docstring, as most `__init__.py` do not."""
    return len(ast.parse(path.read_text()).body) > 1


def names_of(path):
    """Return the names that a table may use for a file: its path, or the last part of it."""
    return {str(path)} if path.name == "__init__.py" else {str(path), path.name}


@pytest.mark.parametrize(("package", "following"), [("actors", "### worker/"), ("worker", "## Sleep")])
def test_every_file_has_a_line(package, following):
    table = section(f"### {package}/\n", following)
    named = set(re.findall(r"`([\w/]+\.(?:py|cpp))`", table))
    files = {
        path
        for path in (PACKAGE / package).rglob("*.*")
        if path.suffix == ".cpp" or (path.suffix == ".py" and has_content(path))
    }
    assert [path for path in files if not named & names_of(path.relative_to(PACKAGE / package))] == []
    assert [name for name in named if not any(str(path).endswith(f"/{name}") for path in files)] == []


class Visits:
    """The files of the package in which functions are called within the block, apart from the test kit."""

    def __enter__(self):
        self._files = set()
        sys.setprofile(self._on_call)
        return self

    def __exit__(self, *exc_info):
        sys.setprofile(None)

    def _on_call(self, frame, event, arg):
        if event == "call":
            self._files.add(frame.f_code.co_filename)

    @property
    def files(self):
        paths = [Path(name) for name in self._files if name.startswith(f"{PACKAGE}/")]
        names = {str(path.relative_to(PACKAGE)) for path in paths}
        return {name for name in names if not name.startswith("testing/")} - ASIDE


async def test_the_life_of_a_request_names_the_files_that_it_visits(autojump_clock):
    async with simulated_engine() as (engine, _), engine.open_session() as session:
        await trio.testing.wait_all_tasks_blocked()  # the tasks that READY has woken are done
        with Visits() as first:
            generation = await session.generate("be", SamplingParams(max_tokens=8, ignore_eos=True)).__aenter__()
            await anext(generation)
        with Visits() as one_more:
            await anext(generation)
        await generation.__aexit__(None, None, None)
    life = section("## The life of a request", "### The types on the way")
    assert first.files <= set(re.findall(r"`([\w/]+\.py)`", life))
    paragraph = section("One more token visits", "**To the last chunk")
    assert one_more.files == set(re.findall(r"`([\w/]+\.py)`", paragraph))
    assert paragraph.startswith(f" {len(one_more.files)} files")
