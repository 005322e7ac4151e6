"""Studies of decision rules: do promises hold, what do they cost, what is calibration worth. See docs/decisions.md."""
