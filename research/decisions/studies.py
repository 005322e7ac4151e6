"""The redraw study on letters: every kind of promise, several mixtures, class counts and reserve sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from research import ROOT
from research.decisions.redraws import MEMORY, CoverageStudy, Draw, RiskStudy, coverage_study, risk_study
from research.decisions.worlds import EASY, TASKS, letters_worlds
from tcil.foundation.files import replace_file

OUT = ROOT / "docs/results/decisions"
CALIBRATOR = "pact"
RANGE = ({"old": 0.9, "new": 0.1}, {"old": 0.6, "new": 0.4})
FINE = tuple(round(0.98 - 0.02 * step, 2) for step in range(40))  # candidates so close that some are just too bold
RISKS: tuple[dict[str, Any], ...] = (
    {"draw": Draw(n_old=100, n_new=100), "risk": 0.1},
    {"draw": Draw(n_old=300, n_new=100), "risk": 0.05},
    {"draw": Draw(n_old=60, n_new=60), "risk": 0.1, "search": "sequence", "reference": 500},
    {"draw": Draw(n_old=300, n_new=150), "risk": 0.1, "mixture": {"old": 0.8, "new": 0.2}},
    {"draw": Draw(n_old=400, n_new=200), "risk": 0.2, "mixture": RANGE, "groups": "predicted"},
    {
        "draw": Draw(n=200, share_new=0.2),
        "risk": 0.05,
        "mixture": "as_sampled",
        "search": "sequence",
        "candidates": FINE,
    },
    {"draw": Draw(per_class=25), "risk": 0.1, "design": "stratified"},
    {"draw": Draw(n_old=100, n_new=100, source=MEMORY), "risk": 0.05},
)
SETS: tuple[dict[str, Any], ...] = (
    {"draw": Draw(n_old=20, n_new=20)},
    {"draw": Draw(n_old=50, n_new=50), "score": "aps"},
    {"draw": Draw(n_old=200, n_new=80), "score": "raps", "alpha": 0.05},
    {"draw": Draw(n=100, share_new=0.2), "by": "marginal"},
    {"draw": Draw(n_new=40), "by": "new", "alpha": 0.2},
    {"draw": Draw(per_class=5), "design": "stratified"},
    {"draw": Draw(n_old=50, n_new=50, source=MEMORY)},
)


def run(cache: Path, redraws: int) -> None:
    """Every study in every world; writes as it goes."""
    risks: list[RiskStudy] = []
    sets: list[CoverageStudy] = []
    worlds = dict(zip(TASKS, letters_worlds(cache, EASY), strict=True))
    for number, world in enumerate(worlds[task] for task in (2, 4, 1)):  # 12, 20 and 8 classes
        for given in RISKS:
            options = {key: value for key, value in given.items() if key != "draw"}
            risks.append(risk_study(world, CALIBRATOR, given["draw"], redraws, seed=number, **options))
            print(_line(risks[-1]), flush=True)
        for given in SETS:
            options = {key: value for key, value in given.items() if key != "draw"}
            sets.append(
                coverage_study(world, CALIBRATOR, given["draw"], redraws, seed=number, allow_empty=True, **options)
            )
            print(_line(sets[-1]), flush=True)
        _write(risks, sets, redraws)
    every: list[RiskStudy | CoverageStudy] = [*risks, *sets]
    sound = [study for study in every if study.draw["source"] != MEMORY]
    broken = [study for study in every if study.draw["source"] == MEMORY]
    print(f"kept {sum(study.kept for study in sound)} of {len(sound)} promises")
    print(f"memory as calibration set: broken {sum(not study.kept for study in broken)} of {len(broken)}")


def _line(study: RiskStudy | CoverageStudy) -> str:
    drawn = {key: value for key, value in study.draw.items() if value and value != "unseen"}
    said = f"{'ok  ' if study.kept else 'FAIL'} {study.world} {drawn} {dict(study.options)}"
    if isinstance(study, RiskStudy):
        return f"{said}: exists {study.exists:.0%}, failures {study.failures} of {study.redraws} ({study.allowed})"
    return f"{said}: coverage {dict(study.coverage)}, size {dict(study.size)}"


def _write(risks: list[RiskStudy], sets: list[CoverageStudy], redraws: int) -> None:
    record = {
        "command": f"python -m research.decisions redraws --redraws {redraws}",
        "what": "ER on letters with a third of their noise, PACT probabilities; 1,000 test images a class are the whole"
        " truth, drawn with replacement. A promise is kept if failures do not exceed `allowed`,"
        " the 1 - 1e-4 quantile of what it says.",
        "risks": [{**asdict(study), "kept": study.kept} for study in risks],
        "sets": [{**asdict(study), "kept": study.kept} for study in sets],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    replace_file(OUT / "redraws.json", (json.dumps(record, indent=1) + "\n").encode())
