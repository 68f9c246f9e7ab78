"""Prompts for any model: the shipped ones, and those of a user's file. Imports nothing of ours."""
