"""`python -m tcil`: the `tcil` command, as torchrun needs it."""

from tcil.experiments.cli import main

main()
