"""Layer 2, class-incremental learning: what trains a network task by task and hands it to layer 1."""
