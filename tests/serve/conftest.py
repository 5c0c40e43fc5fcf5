"""The fixture of the front's tests."""

import pytest
from clients import open_clients


@pytest.fixture
async def clients(autojump_clock):
    """A server whose engine is ready; at the end no session, request or task may be left."""
    async with open_clients() as clients:
        yield clients
