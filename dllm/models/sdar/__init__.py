"""SDAR and SDAR-MoE (Qwen3 backbones), and TraDo, which has the same architecture."""
