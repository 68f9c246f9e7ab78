"""SDAR and SDAR-MoE, TraDo, Tiny-A2D, Stable-DiffCoder: Llama, Qwen2 or Qwen3, decoded alike."""
