"""docs/results.md: what was found here, one picture for each question, and the claims. docs/results-tables.md: tables.

    make results        (or: python -m research.overview)

reads docs/results/compact, small, letters and runs (copies left by `tcil report RUNS --keep DIR`) and
docs/results/official-checkpoints.json, and writes both pages and docs/images/overview/*.svg. Nothing is trained.
docs/results-short.md (`python -m research.results`) has the details of the schedule `short-0.2`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from research import ROOT
from research.overview.claims import claims
from research.overview.pictures import questions, task_by_task
from research.overview.sources import IMAGES, MANY_TASKS, PAGE, TABLES, has_present_form, runs_in, sources
from research.overview.summary import beside_the_paper, summary
from research.overview.tables import coverage, of_regime, precisions, tables
from tcil.foundation.files import replace_file

HEAD = """# Results on CIFAR, Tiny-ImageNet and letters

What the calibrators do on networks that this project has trained, beside the authors' networks and the paper's numbers.
*Optimal TS* is the oracle: one temperature fitted to the test labels. PACT is ours, the other calibrators are the
paper's. [Where these numbers come from](#where-these-numbers-come-from) says which of them PACT was developed on.
"""

TABLES_HEAD = """# All tables of CIFAR, Tiny-ImageNet and letters

Every number behind [results](results.md), which has what was found, pictures, claims and what is missing. `make
results` writes both pages from the JSON files under `docs/results/`.

**In short**, by section: which runs are of [the paper's regime](#is-it-the-papers-regime), ECE [after each
task](#ece-after-each-task), every calibrator by data and learner, and [the paper's tables beside
ours](#beside-the-paper).
"""

ORIGIN = """## Where these numbers come from

Written by `make results` from the JSON files under `docs/results/`; the paper's numbers are those it prints. All runs
were made by this project on two shared CPU cores. Unless a table says otherwise, numbers are means over tasks, and then
over seeds. Learners are as [described](learners.md); runs on 20 classes of CIFAR-100 with the learners of version 0.2.0
are [on a page of their own](results-short.md), and count in nothing here.

**PACT was developed on runs of this page**: 13 of the 20 on letters, and its constants also on runs of `small`, as [the
protocol](pact-protocol.md) says round by round. [The page on PACT](pact.md) has runs that were not looked at. Not all
runs have PACT in [its present form](pact.md#results); [the others](pact-history.md#which-page-shows-which-form) have an
earlier one.

- PACT in its present form, the authors' checkpoints: all.
"""


def main() -> None:
    """Write the page and its pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for page, text in written().items():
        replace_file(page, text.encode())
        print(page.relative_to(ROOT))


def written() -> dict[Path, str]:
    """Both pages; their pictures are drawn."""
    found = sources()
    drawn = [source for source in found if source.name != MANY_TASKS]  # with two learners, it is a row of tables alone
    pages = {
        PAGE: [
            HEAD, *summary(found), *questions(drawn), *beside_the_paper(found), *claims(found), ORIGIN.rstrip(),
            *forms(), *coverage(),
        ],
        TABLES: [TABLES_HEAD, *of_regime(found), *task_by_task(drawn), *tables(found), *precisions()],
    }  # fmt: skip
    return {page: "\n".join(parts).rstrip() + "\n" for page, parts in pages.items()}


def forms() -> Iterator[str]:
    """Which runs of this page have PACT in its present form, with a temperature of their own for new classes."""
    for name, folder in {"letters": "letters", "the schedule `small`": "small", "`compact`": "compact"}.items():
        runs = runs_in(folder)
        present = [run for run in runs if has_present_form(run)]
        told = (
            ", ".join(f"{run.learner.upper()} on {run.settings.dataset}, seed {run.seed}" for run in present)
            or "no run"
        )
        which = "all runs" if len(present) == len(runs) else told
        which += f" ({len(present)} of {len(runs)})"
        yield f"- PACT in its present form, {name}: {which}."
    yield ""


if __name__ == "__main__":
    main()
