"""The boundary of the models: an architecture is a file of its own, found by its name."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from trioengine.hub.checkpoint import HF_ARCHITECTURES
from trioengine.worker import models

WORKER = Path(models.__file__).parents[1]


@pytest.mark.parametrize("model_type", HF_ARCHITECTURES)
def test_every_configuration_that_is_read_has_a_model(model_type):
    assert callable(importlib.import_module(f"trioengine.worker.models.{model_type}").Model)


def test_every_model_has_a_configuration_that_is_read():
    assert {found.name for found in pkgutil.iter_modules(models.__path__)} - {"base"} == set(HF_ARCHITECTURES)


def test_the_rest_of_the_worker_names_no_architecture():
    files = [path for path in WORKER.rglob("*.py") if path.parent.name != "models"]
    assert len(files) > 20
    imports = [line for path in files for line in path.read_text().splitlines() if "import" in line]
    assert not [line for line in imports for name in HF_ARCHITECTURES if f"{name}_" in line or f"models.{name}" in line]
