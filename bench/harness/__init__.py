"""Tasks and a model of lm-evaluation-harness (docs/clients.md)."""
