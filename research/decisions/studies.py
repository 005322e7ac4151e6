"""The redraw study on letters: every kind of promise, several mixtures, class counts and reserve sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from research import ROOT
from research.decisions.redraws import MEMORY, CoverageStudy, Draw, RiskStudy, coverage_study, risk_study
from research.decisions.worlds import TASKS, letters_worlds
from tcil.foundation.files import replace_file
from tcil.incremental.data.datasets import letters

OUT = ROOT / "docs/results/decisions"
CALIBRATOR = "pact"
RANGE = ({"old": 0.9, "new": 0.1}, {"old": 0.6, "new": 0.4})
KNOWN = {"old": 0.8, "new": 0.2}
FINE = tuple(round(0.98 - 0.02 * step, 2) for step in range(40))  # candidates so close that some are just too bold
IN_STEPS = {"mixture": "as_sampled", "search": "sequence", "candidates": FINE}
Setting = dict[str, Any]
SETS: tuple[Setting, ...] = (
    {"draw": Draw(n_old=9, n_new=9)},  # the smallest n for this alpha
    {"draw": Draw(n_old=20, n_new=20)},
    {"draw": Draw(n_old=50, n_new=50), "score": "aps"},
    {"draw": Draw(n_old=200, n_new=80), "score": "raps", "alpha": 0.05},
    {"draw": Draw(n=100, share_new=0.2), "by": "marginal"},
    {"draw": Draw(n_new=40), "by": "new", "alpha": 0.2},
    {"draw": Draw(per_class=5), "design": "stratified"},
    {"draw": Draw(n_old=50, n_new=50, source=MEMORY)},
)


@dataclass(frozen=True)
class Plan:
    """What is drawn from letters of one difficulty. Written before the study ran; docs/decisions.md has the list."""

    noise: int
    tasks: tuple[int, ...]
    risks: tuple[Setting, ...]
    sets: tuple[Setting, ...] = SETS


EASY = Plan(
    noise=24,  # a third of the preset's
    tasks=(2, 4, 1),  # 12, 20 and 8 classes
    risks=(
        {"draw": Draw(n_old=100, n_new=100), "risk": 0.1},
        {"draw": Draw(n_old=300, n_new=100), "risk": 0.05},
        {"draw": Draw(n_old=60, n_new=60), "risk": 0.1, "search": "sequence", "reference": 500},
        {"draw": Draw(n_old=300, n_new=150), "risk": 0.1, "mixture": KNOWN},
        {"draw": Draw(n_old=400, n_new=200), "risk": 0.2, "mixture": RANGE, "groups": "predicted"},
        {"draw": Draw(n=200, share_new=0.2), "risk": 0.05, **IN_STEPS},
        {"draw": Draw(per_class=25), "risk": 0.1, "design": "stratified"},
        {"draw": Draw(n_old=100, n_new=100, source=MEMORY), "risk": 0.05},
    ),
)
FULL = Plan(
    noise=letters.NOISE,  # as the preset has it
    tasks=(2, 4),
    risks=(
        {"draw": Draw(n_old=300, n_new=100), "risk": 0.1},
        {"draw": Draw(n_old=300, n_new=100), "risk": 0.2},
        {"draw": Draw(n_old=200, n_new=200), "risk": 0.3},
        {"draw": Draw(n_old=100, n_new=100), "risk": 0.3, "search": "sequence", "reference": 500},
        {"draw": Draw(n_old=300, n_new=150), "risk": 0.3, "mixture": KNOWN},
        {"draw": Draw(n_old=400, n_new=200), "risk": 0.4, "mixture": RANGE, "groups": "predicted"},
        {"draw": Draw(n=200, share_new=0.2), "risk": 0.2, **IN_STEPS},
        {"draw": Draw(per_class=25), "risk": 0.3, "design": "stratified"},
        {"draw": Draw(n_old=100, n_new=100, source=MEMORY), "risk": 0.1},
    ),
)
PLANS = (FULL, EASY)


def run(cache: Path, redraws: int) -> None:
    """Every study in every world; writes as it goes."""
    risks: list[RiskStudy] = []
    sets: list[CoverageStudy] = []
    for plan in PLANS:
        worlds = dict(zip(TASKS, letters_worlds(cache, plan.noise), strict=True))
        for number, world in enumerate(worlds[task] for task in plan.tasks):
            for given in plan.risks:
                options = {key: value for key, value in given.items() if key != "draw"}
                risks.append(risk_study(world, CALIBRATOR, given["draw"], redraws, seed=number, **options))
                print(_line(risks[-1]), flush=True)
            for given in plan.sets:
                options = {key: value for key, value in given.items() if key != "draw"}
                options["allow_empty"] = True
                sets.append(coverage_study(world, CALIBRATOR, given["draw"], redraws, seed=number, **options))
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
        "what": "ER on letters with the preset's noise (72) and a third of it (24), PACT probabilities; 1,000 test"
        " images per class are the whole truth, drawn with replacement. A promise is kept if failures do not exceed"
        " `allowed`, the 1 - 1e-4 quantile of what it says.",
        "risks": [{**asdict(study), "kept": study.kept} for study in risks],
        "sets": [{**asdict(study), "kept": study.kept} for study in sets],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    replace_file(OUT / "redraws.json", (json.dumps(record, indent=1) + "\n").encode())
