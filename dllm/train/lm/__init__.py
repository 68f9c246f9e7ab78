"""The objectives of language models: block diffusion, and an autoregressive twin."""
