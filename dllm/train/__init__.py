"""Making and training small checkpoints in the released format."""
