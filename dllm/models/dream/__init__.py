"""Dream-7B and DiffuCoder (arXiv 2508.15487, 2506.20639): whole sequences, shifted logits."""
