"""PACT and PACT-R on development and final worlds: docs/pact-protocol.md, docs/pact.md.

    python -m research.pact train RUNS [WORLD...] [--reserve N] [--learners NAME...]   # final worlds, or those named
    python -m research.pact develop RUN...        # development runs, into docs/results/pact/development-two/
    python -m research.pact final RUNS            # once: final worlds not measured yet, into docs/results/pact/final/
    python -m research.pact sizes RUNS            # other sizes and controls: train and measure, into .../sizes-eight/
    python -m research.pact cifar RUN...          # once, with TCIL_DATA=DIR: runs without a reserve, into .../cifar100/
    python -m research.pact small RUN...          # once, with TCIL_DATA=DIR: round four, into .../small/
    python -m research.pact sixth RUN...          # once, with TCIL_DATA=DIR: round six, into .../round-six/
    python -m research.pact eighth RUN...         # once, with TCIL_DATA=DIR: round eight, into .../round-eight/
    python -m research.pact ninth RUNS            # once: round nine's worlds, trained before, into .../round-nine/
    python -m research.pact tenth RUNS            # once, with TCIL_DATA=DIR: round ten's worlds, into .../round-ten/
    python -m research.pact leads RUNS            # after it: what else was tried on F17 and F18, into .../leads-nine/
    python -m research.pact imbalance RUNS        # PACT told a wrong imbalance: into .../imbalance-eight/
    python -m research.pact draws RUNS            # several validation sets of one network, into .../draws-eight/
    python -m research.pact cost RUNS             # what the reserve costs in accuracy: worlds with and without it
    python -m research.pact constants [NAME...]   # PACT's constants, from the development runs of round one or others
    python -m research.pact tables NAME [WORLD...]  # every table of what is kept in docs/results/pact/NAME
    python -m research.pact candidates            # the test of round three: F3 and F4
    python -m research.pact page                  # the tables of docs/pact.md and docs/pact-history.md

Every method turns what is known after a task into probabilities of the test images. Where a development run has no
reserve, two images of each old class are taken out of its test set and serve as one. Tasks without old classes are left
out: nothing is to be balanced there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from research.pact import (
    confirmation,
    constants,
    draws,
    imbalance,
    leads,
    page,
    real_images,
    residuals,
    rounds,
    sizes,
    small,
    spread,
    verdicts,
)
from research.pact.measuring import STORED, of_families, store, stored
from research.pact.methods import FAMILIES
from research.pact.tables import candidates, summary
from research.pact.worlds import FINAL, LEARNERS, NINTH, RESERVED, TENTH, WORLDS, final_settings, train, trained
from tcil.experiments.runs.store import RunFolder

PRINTED = ("overview", "by-method", "goals", "real-images", "one-temperature", "spread", "verdicts", "residuals")


def keep(name: str, folders: Iterable[Path]) -> None:
    """Measure these runs once, and print the tables of all that are kept under this name."""
    store(name, folders, of_families(FAMILIES))
    print("\n".join(summary(stored(name))))


def final(out: Path) -> None:
    """The final worlds that have no record yet, as far as every learner is trained, by the protocol's order."""
    folders = list[Path]()
    for world in FINAL:
        done = trained(out, world)
        names = [final_settings(world, learner).name for learner in LEARNERS]
        kept = [name for name in names if (STORED / "final" / f"{name}.json").exists()]
        print(f"{world}: {len(done)} of {len(LEARNERS)} runs are trained, {len(kept)} measured before")
        if len(done) == len(LEARNERS):
            folders += done
    keep("final", folders)


def cost(out: Path) -> None:
    """The accuracy of worlds with and without a reserve, of the learners for which both were trained."""
    lines = list[str]()
    for world, learner in itertools.product(("F1", "D1", *NINTH[:2], *TENTH[:2]), LEARNERS):
        pair = [RunFolder(out / final_settings(world, learner, r).name).read_results() for r in (0, RESERVED)]
        if all(result is not None for result in pair):
            values = [
                100 * float(np.mean([task.calibrators["vanilla"].accuracy for task in result.tasks]))  # type: ignore[union-attr, arg-type]
                for result in pair
            ]
            lines.append(
                f"- {world} {learner.upper()}: accuracy {values[0]:.2f} % without a reserve, {values[1]:.2f} % with it"
            )
    print("\n".join(lines))


def tables_of(name: str, worlds: Sequence[str] = ()) -> list[str]:
    """Every table of what is kept under a name, of all worlds or of some."""
    own = {
        **dict.fromkeys(("draws", draws.FOLDER), lambda: draws.table(stored(name))),
        **dict.fromkeys(("imbalance", imbalance.FOLDER), lambda: imbalance.table(stored(name))),
        **dict.fromkeys(("sizes", sizes.FOLDER), lambda: sizes.table(sizes.stored(name))),
        "small": lambda: small.tables(small.stored()),
        "round-five": lambda: rounds.tables(rounds.SIX, rounds.stored(rounds.SIX, "round-five")),
        "one-temperature": lambda: rounds.one_temperature(),
        "spread": lambda: spread.table(),
        "round-six": lambda: rounds.tables(rounds.SIX, rounds.stored(rounds.SIX)),
        "round-seven": lambda: rounds.tables(rounds.SEVEN, rounds.stored(rounds.SEVEN)),
        "round-eight": lambda: rounds.tables(rounds.EIGHT, rounds.stored(rounds.EIGHT)),
        confirmation.FOLDER: lambda: confirmation.tables(),
        real_images.FOLDER: lambda: real_images.tables(),
        "real-images": lambda: confirmation.real_tables(),
        "overview": lambda: confirmation.overview(),
        "by-method": lambda: confirmation.by_learner(confirmation.fresh()),
        "goals": lambda: confirmation.goals(),
        leads.FOLDER: lambda: leads.tables(),
        "verdicts": lambda: verdicts.table(),
        "residuals": lambda: residuals.table(),
    }
    if name in own:
        return own[name]()
    seeds = {WORLDS[world]["seed"] for world in worlds or WORLDS}
    return summary([record for record in stored(name) if not worlds or record["about"]["seed"] in seeds])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m research.pact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("final", "cost", "sizes", "ninth", "tenth", "leads", "imbalance", "draws"):
        commands.add_parser(name).add_argument("out", type=Path)
    trained = commands.add_parser("train")
    trained.add_argument("out", type=Path)
    trained.add_argument("worlds", nargs="*", choices=[*WORLDS, []], metavar="WORLD")
    trained.add_argument("--reserve", type=int, default=RESERVED)
    trained.add_argument("--learners", nargs="+", choices=LEARNERS, default=LEARNERS)
    for name in ("develop", "cifar", "small", *rounds.ROUNDS):
        commands.add_parser(name).add_argument("runs", type=Path, nargs="+")
    kept = sorted(path.name for path in STORED.iterdir() if path.is_dir())
    tables = commands.add_parser("tables")
    tables.add_argument("name", choices=[*kept, *PRINTED])
    tables.add_argument("worlds", nargs="*", choices=[*WORLDS, []], metavar="WORLD")
    commands.add_parser("constants").add_argument("names", nargs="*", choices=[*kept, []], metavar="NAME")
    commands.add_parser("candidates")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "train":
        train(given.out, given.worlds or FINAL, given.reserve, given.learners)
    elif given.command == "final":
        final(given.out)
    elif given.command == "cost":
        cost(given.out)
    elif given.command == "sizes":
        sizes.run(given.out)
    elif given.command == "ninth":
        confirmation.run(given.out)
    elif given.command == "tenth":
        real_images.run(given.out)
    elif given.command == "leads":
        leads.run(given.out)
    elif given.command == "imbalance":
        imbalance.run(given.out)
    elif given.command == "draws":
        draws.run(given.out)
    elif given.command == "develop":
        keep("development-two", given.runs)
    elif given.command == "cifar":
        keep("cifar100", given.runs)
    elif given.command == "small":
        small.run(given.runs)
    elif given.command in rounds.ROUNDS:
        rounds.run(rounds.ROUNDS[given.command], given.runs)
    elif given.command == "tables":
        print("\n".join(tables_of(given.name, given.worlds)))
    elif given.command == "candidates":
        print("\n".join(candidates(stored("final"))))
    elif given.command == "constants":
        constants.fit(given.names or ["development"])
    else:
        page.write()


if __name__ == "__main__":
    main()
