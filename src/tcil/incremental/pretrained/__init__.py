"""Backbones that were trained elsewhere, their features on disk, and heads that learn classes on top of them."""
