"""`python -m tcil`: the `tcil` command, as torchrun needs it."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # `python -m` puts the current folder before all that is installed; `tcil` does without it

from tcil.experiments.cli.launch import main

main()
