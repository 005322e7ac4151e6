"""Class-incremental learning: datasets, task streams, memories, networks, and learners that train task by task."""
