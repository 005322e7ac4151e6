"""Prediction sets: against the obvious version and MAPIE, by group, exported, read back, cross-fitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tcil import decisions
from tcil.decisions import ConformalSets, DecisionVerdict

NEW = range(8, 12)


def plain_scores(probs, score, penalty=0.01, free_ranks=5):
    """Label by label, as the papers write them."""
    found = np.zeros_like(probs)
    for i, row in enumerate(probs):
        order = np.argsort(-row, kind="stable")
        for rank, label in enumerate(order, start=1):
            if score == "lac":
                found[i, label] = 1 - row[label]
            else:
                found[i, label] = row[order[:rank]].sum()
                if score == "raps":
                    found[i, label] += penalty * max(0, rank - free_ranks)
    return found


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_are_those_of_the_obvious_version(drawn, score):
    probs, labels = drawn
    scores = plain_scores(probs, score)
    own = np.sort(scores[np.arange(200), labels[:200]])
    limit = own[int(np.ceil(201 * 0.9)) - 1]
    sets = ConformalSets(alpha=0.1, by="marginal", score=score, allow_empty=True).fit(probs[:200], labels[:200])
    assert (sets.predict(probs[200:]) == (scores[200:] <= limit + 1e-12)).all()


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_lac_sets_agree_with_mapie(drawn, alpha):
    pytest.importorskip("mapie", reason="MAPIE is not installed (extra dev)")
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):
        """A classifier whose inputs are its probabilities."""

        classes_, fitted_ = np.arange(12), True

        def fit(self, x, y):
            return self

        def predict_proba(self, x):
            return np.asarray(x)

        def predict(self, x):
            return np.asarray(x).argmax(1)

    probs, labels = drawn
    theirs = SplitConformalClassifier(Given(), confidence_level=1 - alpha, conformity_score="lac", prefit=True)
    theirs.conformalize(probs[:200], labels[:200])
    _, wanted = theirs.predict_set(probs[200:])
    ours = ConformalSets(alpha=alpha, by="marginal", allow_empty=True).fit(probs[:200], labels[:200])
    assert (ours.predict(probs[200:]) == wanted[:, :, 0]).all()


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_aps_thresholds_agree_with_mapie(drawn, alpha):
    pytest.importorskip("mapie", reason="MAPIE is not installed (extra dev)")
    from mapie.conformity_scores import APSConformityScore

    probs, labels = drawn[0][:200], drawn[1][:200]
    theirs = APSConformityScore()
    scores, _ = theirs.get_true_label_cumsum_proba(labels, probs, np.arange(12))
    wanted = theirs.get_conformity_score_quantiles(scores, np.array([alpha]), cv="prefit")
    ours = ConformalSets(alpha=alpha, by="marginal", score="aps").fit(probs, labels)
    assert ours.result_.thresholds[0].threshold == pytest.approx(float(wanted[0]))


def test_groups_have_the_threshold_of_their_own_images(drawn):
    probs, labels = drawn
    new = np.isin(labels, NEW)
    sets = ConformalSets(alpha=0.1).fit(probs, labels, NEW)
    for found, rows in zip(sets.result_.thresholds, (~new, new), strict=True):
        alone = ConformalSets(alpha=0.1, by="marginal").fit(probs[rows], labels[rows]).result_.thresholds[0]
        assert (found.threshold, found.n) == (alone.threshold, alone.n)
    limits = np.where(np.arange(12) >= 8, sets.result_.thresholds[1].threshold, sets.result_.thresholds[0].threshold)
    inside = sets.predict(probs)
    top = np.eye(12, dtype=bool)[probs.argmax(1)]
    assert (inside == (1 - probs <= limits + 1e-12) | top).all()
    assert inside.any(1).all()


def test_new_classes_alone_need_no_old_images(drawn):
    probs, labels = drawn
    new = np.isin(labels, NEW)
    alone = ConformalSets(by="new").fit(probs[new], labels[new], NEW)
    with_old = ConformalSets(by="new").fit(probs, labels, NEW)
    assert alone.result_ == with_old.result_
    with pytest.raises(ValueError, match="by='new' still has an answer"):
        ConformalSets().fit(probs[new], labels[new], NEW)


def test_every_class_on_its_own(drawn):
    probs, labels = drawn
    sets = ConformalSets(alpha=0.2, by="class").fit(probs, labels, classes=range(12))
    assert [found.group for found in sets.result_.thresholds] == [str(label) for label in range(12)]
    found = sets.result_.thresholds[3]
    own = np.sort(1 - probs[labels == 3, 3])
    assert found.threshold == own[int(np.ceil((len(own) + 1) * 0.8)) - 1]


def test_too_few_images_put_every_class_into_the_set(drawn):
    probs, labels = drawn
    new = np.isin(labels, NEW)
    rows = np.concatenate([np.flatnonzero(~new)[:8], np.flatnonzero(new)[:30]])
    sets = ConformalSets(alpha=0.1).fit(probs[rows], labels[rows], NEW)
    old = sets.result_.thresholds[0]
    assert (old.verdict, old.begins_at, old.coverage) == (DecisionVerdict.TOO_FEW_IMAGES, 9, 1.0)
    assert sets.predict(probs)[:, :8].all()
    assert not sets.predict(probs)[:, 8:].all()
    assert "Smallest number: 9 images." in sets.result_.message


def test_kinds_go_in_and_come_out(drawn):
    sets = ConformalSets().fit(torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1]), NEW)
    assert isinstance(sets.predict(torch.from_numpy(drawn[0])), torch.Tensor)
    assert isinstance(sets.predict(drawn[0]), np.ndarray)
    names = [10 * label for label in range(12)]
    renamed = ConformalSets().fit(drawn[0], 10 * drawn[1], [10 * label for label in NEW], classes=names)
    assert renamed.result_ == sets.result_
    assert renamed.new_classes_ == (80, 90, 100, 110)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_are_wrapped_exported_and_read_back(drawn, tmp_path, score):
    sets = ConformalSets(score=score).fit(*drawn, NEW)
    inputs = torch.from_numpy(drawn[0]).log()
    served = sets.wrap(torch.nn.Identity(), calibrated=False)
    wanted = torch.from_numpy(sets.predict(drawn[0]))
    assert (served(inputs) == wanted).double().mean() > 0.9999  # a softmax of logarithms rounds
    if score == "raps":  # exporting once takes long enough
        exported = torch.export.export(served, (inputs,), dynamic_shapes=({0: torch.export.Dim("n")},))
        assert torch.equal(exported.module()(inputs[:9]), served(inputs[:9]))
    again = decisions.load(sets.save(tmp_path / "sets.json"))
    assert again.result_ == sets.result_
    assert (again.predict(drawn[0]) == sets.predict(drawn[0])).all()
    assert repr(again) == repr(sets)


def test_served_behind_a_calibrator(task):
    import tcil

    valid = tcil.predict_logits(task.model, task.test)
    scaling = tcil.TemperatureScaling().fit(*valid)
    probs = scaling.predict_proba(valid[0])
    sets = ConformalSets(alpha=0.2).fit(probs, valid[1], task.new_classes)
    served = sets.wrap(scaling.wrap(task.model))
    assert (served(task.test[0]) == sets.predict(probs)).double().mean() > 0.999
    with pytest.warns(tcil.CalibrationWarning, match="not wrapped by a calibrator"):
        sets.wrap(task.model)


# Cross-fitting -----------------------------------------------------------------------------------------------


def test_cross_fitted_sets_are_those_of_the_obvious_version(drawn):
    probs, labels = drawn
    rng = np.random.default_rng(0)
    rows = np.concatenate([np.flatnonzero(np.isin(labels, NEW) == group)[:60] for group in (False, True)])
    folds = np.arange(120) % 3
    by_fold = [probs[300:340] ** t / (probs[300:340] ** t).sum(1, keepdims=True) for t in (0.9, 1.0, 1.1)]
    own = np.stack([probs[row] ** t for row, t in zip(rows, np.array([0.9, 1.0, 1.1])[folds], strict=True)])
    own /= own.sum(1, keepdims=True)
    crossed = decisions.cross_conformal_sets(own, labels[rows], folds, by_fold, new_classes=NEW, alpha=0.1)
    mine = 1 - own[np.arange(120), labels[rows]]
    for i in rng.choice(40, 8, replace=False):
        for label in range(12):
            same = np.isin(labels[rows], NEW) == (label in NEW)
            smaller = sum(mine[j] < 1 - by_fold[folds[j]][i, label] - 1e-12 for j in np.flatnonzero(same))
            assert crossed.sets[i, label] == (smaller < 0.9 * 61)
    assert crossed.coverage_old == pytest.approx(1 - 0.2 - min(2 * (2 / 3) / 21, (1 - 3 / 60) / 4))


def test_cross_fitting_on_stratified_images_promises_less():
    probs = np.tile([[0.5, 0.3, 0.2]], (80, 1))
    labels, folds = np.repeat([0, 1], 40), np.arange(80) % 2
    given = (probs, labels, folds, [probs[:1]] * 2)
    plain, stratified = (
        decisions.cross_conformal_sets(*given, new_classes=[2], design=design)
        for design in ("independent", "stratified")
    )
    assert (plain.sets == stratified.sets).all()
    assert stratified.coverage_old == pytest.approx(1 - 2 * (0.1 * 81 - 1 + 2 * 2) / (80 + 2 * 2))
    assert stratified.coverage_old < plain.coverage_old


def test_cross_fitting_covers_what_it_promises(world):
    """A temperature that is fitted on the same images, fold by fold."""
    rng = np.random.default_rng(3)
    probs, columns, n = world.probs["vanilla"], world.columns, 20
    hits = []
    for _ in range(100):
        rows = np.concatenate([rng.choice(np.flatnonzero(world.new[columns] == g), 2 * n) for g in (False, True)])
        folds, temperatures = np.arange(4 * n) % 4, []
        for fold in range(4):
            kept = rows[folds != fold]
            right = (probs[kept].argmax(1) == columns[kept]).mean()
            temperatures.append(1.5 if right > probs[kept].max(1).mean() else 0.7)
        sharper = [probs**t for t in temperatures]
        test = rng.choice(np.flatnonzero(~world.new[columns]), 100)
        own = np.stack([sharper[f][row] for row, f in zip(rows, folds, strict=True)])
        crossed = decisions.cross_conformal_sets(
            own / own.sum(1, keepdims=True), columns[rows], folds,
            [part[test] / part[test].sum(1, keepdims=True) for part in sharper], new_classes=world.new_classes,
        )  # fmt: skip
        hits.append(crossed.sets[np.arange(100), columns[test]].mean())
    assert np.mean(hits) >= crossed.coverage_old - 4 * np.std(hits) / 10
