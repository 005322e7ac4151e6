"""The learners, one file each; `base` is what they share. Anything else as `package.module:Learner`."""

from tcil.incremental.learners.base import Head, Learner, LearnerOptions, Stage, TaskData
from tcil.incremental.learners.registry import LEARNERS, make_learner

__all__ = ["LEARNERS", "Head", "Learner", "LearnerOptions", "Stage", "TaskData", "make_learner"]
