"""The names of version 0.1 work for one more version, with a warning that says where they are now."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

import tcil

MOVED = {
    "CalibratedModel": "results.CalibratedModel",
    "CalibrationMap": "extending.CalibrationMap",
    "Calibrator": "extending.Calibrator",
    "DirectionPolicy": "options.DirectionPolicy",
    "EnsembleFit": "results.EnsembleResult",
    "GroupTemperatureFit": "results.GroupTemperatureResult",
    "IsotonicFit": "results.IsotonicResult",
    "NoiseLevel": "results.NoiseLevel",
    "NoiseSearch": "options.NoiseSearch",
    "PACTEvidence": "results.PACTEvidence",
    "PACTResult": "results.PACTResult",
    "PerturbedFit": "results.PerturbedResult",
    "SearchMethod": "options.SearchMethod",
    "SearchStep": "results.SearchStep",
    "Solver": "options.Solver",
    "TCILEvidence": "results.TCILEvidence",
    "TCILResult": "results.TCILResult",
    "TemperatureFit": "results.TemperatureFit",
    "Verdict": "options.Verdict",
    "sharded": "distributed.sharded",
}
OLD_NAMES = {  # tcil.__all__ of version 0.1
    *MOVED, "PACT", "TCIL", "CalibrationWarning", "EnsembleTemperatureScaling", "FirstTaskTemperatureScaling",
    "GroupTemperatureScaling", "MulticlassIsotonic", "NotFittedError", "NotReachableError",
    "PerturbedTemperatureScaling", "TemperatureScaling", "WeightsMismatchError", "__version__", "fit_temperature",
    "load", "metrics", "networks", "predict_logits",
}  # fmt: skip
MODULES = {
    "tcil.incremental.images": ("Dataset", "ImageSet"),
    "tcil.experiments.calibration": ("Entry", "FinishedTask", "NotApplicable"),
}


@pytest.mark.parametrize("name", MOVED)
def test_each_name_works_and_says_where_it_is(name):
    module, new = MOVED[name].split(".")
    with pytest.warns(DeprecationWarning, match=rf"^tcil\.{name} has moved: use tcil\.{module}\.{new}\. ") as caught:
        old = getattr(tcil, name)
    assert old is getattr(getattr(tcil, module), new)
    assert [warning.filename for warning in caught] == [__file__]
    assert name not in tcil.__all__


def test_every_use_warns():
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="tcil.Verdict has moved"):
            from tcil import Verdict  # noqa: F401


def test_no_name_of_version_0_1_is_lost():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [name for name in sorted(OLD_NAMES) if not hasattr(tcil, name)] == []


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(tcil):
            getattr(tcil, name)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MODULES.items() for name in names])
def test_old_modules(module, name):
    old = importlib.import_module(module)
    with pytest.warns(
        DeprecationWarning, match=rf"^{module}\.{name} has moved: use tcil\.extending\.{name}\. "
    ) as caught:
        found = getattr(old, name)
    assert found is getattr(tcil.extending, name)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = old.Nothing


def test_the_old_place_of_learners_is_still_theirs():
    from tcil.incremental.learners import Learner

    assert Learner is tcil.extending.Learner


@pytest.mark.processes
def test_a_users_file_of_version_0_1_runs(tmp_path):
    """As written after the documents of version 0.1; the warning names the line."""
    (tmp_path / "parts.py").write_text(
        "import tcil\n"
        "from tcil.incremental.images import Dataset\n"
        "from tcil.incremental.learners import Learner\n"
        "from tcil.experiments.calibration import Entry\n"
        "class Mine(tcil.Calibrator): pass\n"
        "print(Entry.__name__, Dataset.__name__, Learner.__name__, Mine.__mro__[1].__name__)\n"
    )
    command = [sys.executable, "-W", "always::DeprecationWarning", "parts.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["Entry", "Dataset", "Learner", "Calibrator"]
    for line in (2, 4, 5):
        assert f"parts.py:{line}: DeprecationWarning: tcil." in ended.stderr
