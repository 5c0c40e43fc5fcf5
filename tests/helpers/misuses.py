"""Statements of Python, as functions, for objects that some of them may not use; the names are those in the errors."""


async def awaited(thing):
    await thing


async def entered(thing):
    with thing:
        pass


async def iterated(thing):
    for _ in thing:
        pass


async def entered_by_async_with(thing):
    async with thing:
        pass


async def iterated_over_by_async_for(thing):
    async for _ in thing:
        pass
