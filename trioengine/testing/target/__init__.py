"""A fuzzer of the request lifecycle for any server with OpenAI's API, by URL.

`machine.py` performs a program of steps and judges the server by it. Like `wire.py`, `dialects.py` and `program.py` it
does no I/O, and imports the standard library alone: it yields operations, which a driver performs. `driver.py` performs
them on trio, and `standalone.py` in a script that is part of a finding.
"""
