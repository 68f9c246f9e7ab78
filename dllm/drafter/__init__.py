"""A block-diffusion (DFlash) drafter for autoregressive targets: speculative decoding, lossless."""
