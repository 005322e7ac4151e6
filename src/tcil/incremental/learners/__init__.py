"""The learners, one file each; `base` has their base class. User learners are named `package.module:Learner`."""

from tcil.incremental.learners.base import Head, Learner, LearnerOptions, Stage, TaskData, TaskSize
from tcil.incremental.learners.registry import LEARNERS, make_learner

__all__ = ["LEARNERS", "Head", "Learner", "LearnerOptions", "Stage", "TaskData", "TaskSize", "make_learner"]
