"""The network front: one port for HTTP and WebSocket."""

from trioengine.serve.config import ServeConfig as ServeConfig
from trioengine.serve.server import Server as Server
from trioengine.serve.server import serve as serve
