"""One run: its folder, its loop, its calibrators, its results."""
