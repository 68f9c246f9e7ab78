"""Which kernel computes attention: one pure function of the GPU, the layer, the rows and a flag.

A server asks it by `flash.flash_kinds`: when it is configured, where it makes a layer's metadata,
and for what is compared and reported at start.

Rows are causal (prompts and emitted blocks), or of a canvas or an image, which see each other.
`calls` makes the calls for a step that holds both.

vLLM's FlashAttention 4 takes a causal flag for each sequence, and a symmetric window. Causal rows
see the same through an anchored window as through a symmetric one. It is chosen on Hopper alone,
for 16-bit caches. On Blackwell it has no heads of 512, and those of 256 only in pages of 128 keys.
How it cuts keys, and so the last bits of a sequence, depends on the whole batch.

For FP8 caches it has no causal flags: on Hopper its loads (``flash_fwd_sm90.py``, ``load_fp8``) do
not look at them while its products do, and the two then wait for each other for ever.
"""

from __future__ import annotations

from dllm.attention.inputs import Layer

OURS, FLASH, TRITON = "CUSTOM", "FLASH_ATTN", "TRITON_ATTN"  # vLLM's names of the backends
BACKENDS = (OURS, FLASH, TRITON)
CAUSAL, CANVASES = KINDS = ("causal", "canvases")  # of rows
HOPPER = 90


def choose_kernel(layer: Layer, kind: str, arch: int, has_flash: bool, option: str | None) -> str:
    """The backend whose kernel serves rows of a kind in a layer.

    ``option`` is what the user asks for, for all rows; None: the fastest. ``has_flash``: version 4
    runs on this GPU. ``arch``: 90 for compute capability 9.0. Raises ValueError if what the user
    asks for cannot serve this layer.
    """
    mask, can_flash = layer.mask, has_flash and _has_head(arch, layer)
    if option is None:
        has_mask = mask.block_length == 1 and (kind == CAUSAL or not mask.is_anchored)
        return FLASH if can_flash and has_mask and arch == HOPPER else OURS
    if option not in BACKENDS:
        allowed = ", ".join(BACKENDS)
        raise ValueError(
            f"--attention-backend {option}: allowed for diffusion models are {allowed}. Leave the "
            "flag out for the fastest."
        )
    if option != OURS and mask.block_length > 1:
        raise ValueError(
            f"--attention-backend {option} has no heads that see blocks. Leave the flag out."
        )
    if option != OURS and mask.is_anchored:
        raise ValueError(
            f"--attention-backend {option} has no anchored canvas window. Leave the flag out, or "
            """serve with --hf-overrides '{"canvas_window": "symmetric"}'."""
        )
    if option == FLASH and not can_flash:
        raise ValueError(
            "--attention-backend FLASH_ATTN: diffusion models need FlashAttention 4, which takes a "
            "causal flag per sequence. It serves 16-bit caches on compute capability 9.0, and with "
            f"heads of at most 128 on 10.x. Here it is {'' if has_flash else 'not '}available, "
            f"heads have {layer.head_size} elements of {layer.cache_dtype or layer.dtype}, and the "
            f"compute capability is {arch / 10}. Leave the flag out, or use --attention-backend "
            "TRITON_ATTN."
        )
    return option


def _has_head(arch: int, layer: Layer) -> bool:
    largest = {9: 512, 10: 128}.get(arch // 10, 0)
    bytes_stored = (layer.cache_dtype or layer.dtype).itemsize
    return bytes_stored == 2 and layer.head_size % 8 == 0 and layer.head_size <= largest
