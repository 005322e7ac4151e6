"""Calibration: tensors in, tensors out.

Nothing here knows of datasets, learners, settings files or run folders. The reading order is

    inputs/         what the user hands over: labelled images, a trained network (features: what its head reads)
    temperature     TempOpt, the exact temperature of a set of logits
    perturbation    where exemplars are pushed, and how far
    calibrators/    T-CIL and the baselines, built from the three above
    storage         fitted calibrators on disk
"""
