"""Thresholds with a stated risk: the rule, the search for a threshold, and what it promises."""
