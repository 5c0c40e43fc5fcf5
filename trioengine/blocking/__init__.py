"""The engine, or a server's client, for code without trio, such as the cells of a notebook.

    engine = open_engine("smollm2-135m-instruct")
    session = engine.open_session()
    for chunk in session.generate("Hello!", max_tokens=32):
        print(chunk.text, end="")

Every call blocks its thread while trio runs in another one, so it works beside a running asyncio loop as well. An
exception in the calling thread, such as the KeyboardInterrupt of Ctrl-C, cancels the task of the call, and the call
returns when that has ended: an answer is aborted, and its turn taken back unless it is kept. Engine, client and session
can be used as context managers; one that was not closed is closed when it is no longer referenced, or Python exits.
"""

from trioengine.blocking.engine import Client as Client
from trioengine.blocking.engine import Engine as Engine
from trioengine.blocking.engine import Generation as Generation
from trioengine.blocking.engine import Session as Session
from trioengine.blocking.engine import connect as connect
from trioengine.blocking.engine import open_engine as open_engine
