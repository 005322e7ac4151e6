"""The suite once for each factor in which machines differ, one factor at a time: `make test-machines`.

    python tests/machines.py [FACTOR ...] [-- words for pytest]

Smaller instruction sets are imitated by torch's and oneDNN's own switches; more can only be had on another machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

FACTORS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no-vectors": ({"ATEN_CPU_CAPABILITY": "default"}, ()),
    "avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, ()),
    "onednn-sse41": ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ()),
    "onednn-avx2": ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, ()),
    "two-threads": ({"OMP_NUM_THREADS": "2", "TCIL_TEST_THREADS": "2"}, ()),
    "order": ({}, ("-p", "randomly")),
}


def main(words: list[str]) -> int:
    """Run each factor to its end; 1 if one of them failed."""
    cut = words.index("--") if "--" in words else len(words)
    names, more = words[:cut] or list(FACTORS), words[cut + 1 :]
    if unknown := set(names) - set(FACTORS):
        sys.exit(f"FACTORS: got {', '.join(sorted(unknown))}; expected some of {', '.join(FACTORS)}.")
    outcomes = {}
    for name in names:
        variables, options = FACTORS[name]
        print(f"--- {name}: {' '.join(f'{key}={value}' for key, value in variables.items())} {' '.join(options)}")
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadgroup", "-q", *options, *more]
        surroundings = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": "1", **variables}
        code = subprocess.run(command, env=surroundings, check=False).returncode
        outcomes[name] = (
            f"{'passed' if code == 0 else f'FAILED (exit code {code})'} in {time.monotonic() - begin:.0f} s"
        )
    width = max(map(len, outcomes))
    print("\n".join(f"{name:{width}}  {outcome}" for name, outcome in outcomes.items()))
    return int(any("FAILED" in outcome for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
