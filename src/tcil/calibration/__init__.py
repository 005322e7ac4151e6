"""Calibration: tensors in, tensors out.

This package does not depend on datasets, learners, settings files or run folders. Suggested reading order:

    inputs/         user input: labelled images and a trained network (features: the input of its head)
    temperature     TempOpt, the exact temperature of a set of logits
    perturbation    the direction and the magnitude of perturbations
    calibrators/    T-CIL and the baselines, built from the three above
    storage         saving and loading fitted calibrators
"""
