"""`python -m tcil`: the `tcil` command as a module, which torchrun needs."""

import os
import sys

try:
    here = os.getcwd()
except FileNotFoundError:  # it was deleted
    here = ""
if not sys.flags.safe_path and sys.path[:1] == [here]:
    del sys.path[0]  # `python -m` puts the current folder before installed packages; the `tcil` script does not

from tcil.experiments.cli.launch import main

main()
