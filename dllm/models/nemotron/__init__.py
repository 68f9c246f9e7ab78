"""Nemotron-Labs-Diffusion: a Ministral 3 that reads causally and fills in canvases of masks."""
