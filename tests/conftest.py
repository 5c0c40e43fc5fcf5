"""The real models that tests may use, and how Hypothesis searches: the same examples every time, however slow."""

import inspect
import os
import resource
from pathlib import Path

import pytest
from hypothesis import settings

from trioengine.core.errors import ModelError
from trioengine.hub.pull import pull

if "PYTEST_XDIST_WORKER" in os.environ:  # other processes need the cores while a thread waits for another one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")


def pytest_addoption(parser):
    parser.addoption("--sessions", type=int, default=100, help="how many sessions the soak has")
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


@pytest.hookimpl(trylast=True)  # after pytest-trio has marked the tests
def pytest_collection_modifyitems(config, items):
    """Leave the tests marked `slow` out, unless --slow asks for them; check that the others have their clock."""
    for item in items:
        is_async_test = item.get_closest_marker("trio") is not None
        arguments = inspect.signature(item.function).parameters  # pytest-trio looks for a clock only there
        if is_async_test and "autojump_clock" in item.fixturenames and "autojump_clock" not in arguments:
            raise pytest.UsageError(f"{item.nodeid} must take autojump_clock, as one of its fixtures does")
    if config.getoption("--slow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    items[:] = [item for item in items if "slow" not in item.keywords]
    config.hook.pytest_deselected(items=slow)


def fetched(name: str) -> Path:
    """A known model's file, fetched once into the user's cache.

    Where it cannot be had, the test is skipped, or fails if the environment has CI=true.
    """
    try:
        return pull(name)
    except ModelError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct's GGUF file."""
    return fetched("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M's GGUF file."""
    return fetched("gemma3-270m")


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request) -> str:
    """The device that a model runs on; the test is skipped where there is none."""
    if request.param == "cuda":
        from helpers.torch_driver import needs_cuda  # imports torch, which few tests need

        needs_cuda()
    return request.param


@pytest.fixture
def descriptors():
    """A function that sets how many descriptors the process may have, until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
