"""Prompts for any model: the bundled ones, and those of a user's file. Imports nothing of ours."""
