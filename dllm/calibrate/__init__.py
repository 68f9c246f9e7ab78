"""Calibration: a drafter learns, from true hidden states, what its target says next."""
