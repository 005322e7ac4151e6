"""Images, the stream of tasks, and the memory of exemplars."""
