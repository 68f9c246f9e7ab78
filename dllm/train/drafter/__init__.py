"""Calibration: a drafter learns from what its target says, and is checked against it."""
