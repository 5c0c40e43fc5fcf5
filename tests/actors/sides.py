"""The two sides that have the same calls: an engine in this process, and a client of a server."""

from contextlib import asynccontextmanager

from clients import open_clients

from trioengine import connect
from trioengine.testing import simulated_engine


@asynccontextmanager
async def an_engine():
    async with simulated_engine() as (engine, _):
        yield engine


@asynccontextmanager
async def a_client():
    async with open_clients(None) as clients, connect("ws://localhost", dial=clients.dial) as client:
        yield client


SIDES = {"engine": an_engine, "client": a_client}
