"""Steps that several of the programs that the fuzzer found begin with, or repeat."""

EMPTY = ("begin", {"ready": True, "sessions": 0, "turns": 0, "asks": 0, "thread_passes": 1})
BEGIN = ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 0, "thread_passes": 1})
A = {
    "which": 0,
    "prompt": "a",
    "stop": "",
    "style": "all",
    "keep_partial": False,
    "timeout": None,
    "wait": False,
    "ignore_eos": False,
}
ASK = {  # of a client
    "which": 0,
    "prompt": "a",
    "stop": "",
    "min_tokens": 0,
    "style": "all",
    "keep_partial": False,
    "timeout": None,
    "wait": None,
    "rounds": 0,
}
ASK_MORE = {  # over HTTP
    "which": 0,
    "prompt": "a",
    "streams": False,
    "stop": None,
    "min_tokens": 0,
    "stop_token": None,
    "top_logprobs": None,
    "choices": 1,
    "seed": None,
    "shows_ids": False,
    "rounds": 6,
}
SHOW = {
    "which": 0,
    "prompt": "a",
    "style": "all",
    "keep_partial": False,
    "timeout": None,
    "wait": True,
}
SECONDS = (*[0.2] * 15, 1.0, *[0.2] * 6, 1.0, *[0.2] * 4, 1.0, *[0.2] * 5, 1.0)
