"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5 with blocks of masks, filled in by sub-blocks."""
