"""Faults on real processes, at moments drawn from a seed: after each, the same command gives what it gives undisturbed.

    python -m benchmarks.faults --faults 200 --out docs/results/faults.json

A small sweep (two seeds of ER on digits, two tasks each) is run once undisturbed. Then it is disturbed again and again,
and every time started once more by the same command: it must end well, leave the same bytes, and not repeat a run that
was finished. Every fault has its own seed, and the counts are stored after each: interrupted, the same command resumes
the same series. tests/experiments/scheduling/test_faults.py runs a few of each kind, and shows that each check fails
once the protection that it is about is taken out (`patch`).

The faults are in `processes`, `nodes`, `disks` and `runs`, by what they happen to; `lab` is where they are injected,
`checks` what must hold afterwards, `seams` where they reach into the library, `series` the command.
"""
