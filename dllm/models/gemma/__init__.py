"""DiffusionGemma: a Gemma4 backbone, entropy-bound denoising, self-conditioning, images."""
