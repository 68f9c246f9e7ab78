"""What SDAR and LLaDA2 share: a canvas starts as masks, and each step replaces some of them."""
