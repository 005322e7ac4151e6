"""User input: datasets, networks, and the features that their last layer reads."""
