"""Run the checks of a program in their order, and print a line for each: `ok NAME`, or `failed NAME: reason`."""

import os
import sys
import traceback

BASE_URL = os.environ["BASE_URL"]  # of the server, without a path
MODEL = os.environ["MODEL"]
TOKENIZER = os.environ["TOKENIZER"]  # a folder in Hugging Face's layout
FOLDER = os.environ["FOLDER"]  # for the program's own files


def report(checks):
    """Run the functions by name, go on after one that fails, and exit with 1 in this case."""
    failed = False
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"failed {name}: {reason[:400]}", flush=True)
            failed = True
        else:
            print(f"ok {name}", flush=True)
    sys.exit(int(failed))
