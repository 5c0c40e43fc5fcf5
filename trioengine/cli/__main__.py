"""`python -m trioengine.cli`."""

from trioengine.cli import main

main()
