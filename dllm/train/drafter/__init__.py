"""``dllm calibrate`` trains a drafter for a target; ``dllm check-drafter`` checks that it fits."""
