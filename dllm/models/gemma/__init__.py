"""DiffusionGemma: settings, denoise step, model, images, loading of checkpoints."""
