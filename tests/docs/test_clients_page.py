"""The page about clients lists the clients that are checked, with their versions; each one's program exists."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = runpy.run_path(str(ROOT / "tests" / "clients" / "catalog.py"))["CLIENTS"]


def test_the_clients_and_their_versions():
    rows = re.findall(r"^\| .*? \| `([\w-]+)` \| ([\d.]+) \|", (ROOT / "docs" / "clients.md").read_text(), re.MULTILINE)
    assert rows == [(client.name, client.shown_version) for client in CLIENTS.values()]


def test_the_programs_exist():
    for client in CLIENTS.values():
        assert (ROOT / "tests" / "clients" / client.program).exists()


def test_each_package_is_pinned():
    for client in CLIENTS.values():
        separator = "@" if client.on_node else "=="
        assert all(re.search(rf".{separator}\d[\d.]*$", package) for package in client.packages), client
