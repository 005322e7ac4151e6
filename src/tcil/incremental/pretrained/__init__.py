"""Pre-trained backbones, their cached features, and heads that are trained on top of them."""
