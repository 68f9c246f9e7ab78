"""``dllm train`` and ``dllm calibrate``: small models, drafters and pilots, by one loop.

Imports everything below it: tools, patches, drafter, models.
"""
