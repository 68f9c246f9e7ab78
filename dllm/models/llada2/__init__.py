"""LLaDA2.0 and LLaDA2.1: the mixture-of-experts backbone of Ling 2.0."""
