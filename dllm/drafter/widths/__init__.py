"""How many drafts of each request the target verifies (its width); ``policy`` is the interface."""
