"""How many drafts of each request the target verifies; ``policy`` is the interface."""
