"""`python -m trioengine`: the command line."""

from trioengine.cli import main

main()
