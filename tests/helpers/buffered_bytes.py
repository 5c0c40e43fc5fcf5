"""Requests and messages whose bytes a server keeps, and how many those are."""

from helpers.clients import CHAT
from helpers.scrapes import now

KEYS = ("k" * 16, "l" * 16)
GREEDY = {"temperature": 0, "max_output_tokens": 5}
LARGE = 20_000


def post(size, sent, key=KEYS[0]):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + b"x" * sent


def bearer(key=KEYS[0]):
    return {"extra_headers": [(b"Authorization", b"Bearer " + key.encode())]}


def say(text, **fields):
    content = [{"type": "input_text", "text": text}]
    return {"item": {"type": "message", "role": "user", "content": content, **fields}}


def buffered(clients):
    """As the gauge has it."""
    return now(clients).value("buffered_bytes")
