"""Images, ours against Hugging Face; run by test_images.py in a process that has torchvision."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DynamicCache
from transformers.models.gemma4 import Gemma4Processor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.test_parity import CANVAS, RELATIVE_TOLERANCE, WINDOW, prompt
from tests.patches.test_admission import MESSAGES, parse_chat
from tests.support import hf_reference
from tests.support.async_engine import get_async_engine
from tests.support.edited import edited
from tests.support.engine_harness import Engine, get_engine, relative_error
from tests.support.images import IMAGE_TOKEN, WITH_TOWER, picture

PLACEHOLDER = [IMAGE_TOKEN]
ONE_CHUNK = 256  # tokens
OPTIONS = dict(max_num_batched_tokens=ONE_CHUNK, block_size=16)


@pytest.fixture(scope="module", params=["vision", None], ids=["bidirectional", "causal"])
def served(request, checkpoint):
    """An engine, the reference and its processor; images see all of themselves, or do not."""
    path = checkpoint(**WITH_TOWER | {"use_bidirectional_attention": request.param})
    engine = get_engine(path, **OPTIONS)
    return engine, hf_reference.load_hf(path), Gemma4Processor.from_pretrained(path)


def generate(engine, ids, images, num_blocks=2, seed=5, **options):
    """vLLM's output of one request, and the denoise steps it took.

    The ids hold one placeholder per image, as the chat template writes it.
    """
    params = SamplingParams(max_tokens=num_blocks * CANVAS, seed=seed, ignore_eos=True, **options)
    inputs = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
    with engine.watch(keep_logits=True) as watched:
        (output,) = engine.llm.generate([inputs], params, use_tqdm=False)
    (steps,) = watched.values()
    return output, steps


def reference_inputs(processor, ids, images):
    """What the reference takes for the same prompt: ids, and keywords with the images."""
    soft_tokens = processor.image_processor(images, return_tensors="pt")
    counts = iter(soft_tokens["num_soft_tokens_per_image"].reshape(-1).tolist())
    boi, eoi = processor.tokenizer.convert_tokens_to_ids([processor.boi_token, processor.eoi_token])
    expanded = []
    for token in ids:
        is_image = token == IMAGE_TOKEN
        expanded += [boi, *[token] * next(counts), eoi] if is_image else [token]
    kinds = (torch.tensor([expanded]) == IMAGE_TOKEN).long()
    return expanded, {
        "pixel_values": soft_tokens["pixel_values"],
        "image_position_ids": soft_tokens["image_position_ids"],
        "mm_token_type_ids": kinds,
    }


@torch.no_grad()
def first_step_logits(model, ids, canvas, mm_token_type_ids, **images):
    """Prefill and one denoise step, with the masks that `generate` makes: [C, V]."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    masks = model.model.encoder.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(1, len(ids), 0),
        attention_mask=None,
        past_key_values=cache,
        position_ids=torch.arange(len(ids))[None],
        mm_token_type_ids=mm_token_type_ids,
    )
    output = model(
        input_ids=torch.tensor([ids]),
        attention_mask=masks,
        past_key_values=cache,
        decoder_input_ids=torch.tensor([canvas]),
        **images,
    )
    return output.logits[0]


PROMPTS = {
    "first": [*PLACEHOLDER, *prompt(9)],
    "in the middle": [*prompt(20), *PLACEHOLDER, *prompt(9)],
    "last": [*prompt(20), *PLACEHOLDER],
    "two in a row": [*prompt(5), *PLACEHOLDER, *PLACEHOLDER, *prompt(9)],
    "out of the window": [*PLACEHOLDER, *prompt(3 * WINDOW)],
    "window full": [*prompt(2 * WINDOW), *PLACEHOLDER, *prompt(9)],
    "across a chunk's end": [*prompt(ONE_CHUNK - 20), *PLACEHOLDER, *prompt(9)],
}


@pytest.mark.parametrize("ids", PROMPTS.values(), ids=PROMPTS)
def test_logits_and_tokens_equal_the_references(served, ids):
    engine, model, processor = served
    images = [picture(1), picture(2, 30, 90)][: ids.count(IMAGE_TOKEN)]
    output, steps = generate(engine, ids, images)
    expanded, inputs = reference_inputs(processor, ids, images)
    assert output.prompt_token_ids == expanded
    logits = first_step_logits(model, expanded, steps[0].canvas, **inputs)
    assert relative_error(steps[0].logits, logits) < RELATIVE_TOLERANCE
    reference = hf_reference.generate_with_noise(model, expanded, num_blocks=2, seed=5, **inputs)
    assert output.outputs[0].token_ids == reference.tokens


def test_both_the_image_and_its_mask_matter(served):
    engine, model, processor = served
    is_bidirectional = engine.runner.model_config.is_mm_prefix_lm
    ids = PROMPTS["in the middle"]
    _, steps = generate(engine, ids, [picture(1)])
    for seed, is_seen_whole in ((2, is_bidirectional), (1, not is_bidirectional)):
        expanded, inputs = reference_inputs(processor, ids, [picture(seed)])
        model.config.text_config.use_bidirectional_attention = "vision" if is_seen_whole else None
        logits = first_step_logits(model, expanded, steps[0].canvas, **inputs)
        assert relative_error(steps[0].logits, logits) > 10 * RELATIVE_TOLERANCE
    model.config.text_config.use_bidirectional_attention = "vision" if is_bidirectional else None


def test_the_prefix_cache_knows_images_apart(served):
    engine, _, _ = served
    ids = [*prompt(40), *PLACEHOLDER, *prompt(20)]
    cold = {}
    for seed in (1, 2):
        engine.reset_prefix_cache()
        output, cold[seed] = generate(engine, ids, [picture(seed)])
        assert output.num_cached_tokens == 0
    assert relative_error(cold[1][0].logits, cold[2][0].logits) > 10 * RELATIVE_TOLERANCE
    # The cache holds picture 2.
    text_before = 32  # whole pages of 16 tokens of the text before the image
    for seed, is_cached in ((1, False), (2, True), (1, True)):
        output, warm = generate(engine, ids, [picture(seed)])
        assert relative_error(warm[0].logits, cold[seed][0].logits) < RELATIVE_TOLERANCE
        assert (output.num_cached_tokens > text_before) == is_cached
        assert output.num_cached_tokens >= text_before


def test_a_prompt_continued_from_the_middle_of_a_cached_image(served):
    engine, _, _ = served
    # 41 tokens and an image of 54: pages of 16 end at 80, inside the image.
    first, other = ([*prompt(40), *PLACEHOLDER, *prompt(4, salt)] for salt in (0, 3))
    engine.reset_prefix_cache()
    cold, cold_steps = generate(engine, other, [picture(1)])
    engine.reset_prefix_cache()
    generate(engine, first, [picture(1)], num_blocks=1)
    warm, warm_steps = generate(engine, other, [picture(1)])
    in_image = [i for i, token in enumerate(warm.prompt_token_ids) if token == IMAGE_TOKEN]
    assert in_image[0] < warm.num_cached_tokens <= in_image[-1]
    assert relative_error(warm_steps[0].logits, cold_steps[0].logits) < RELATIVE_TOLERANCE
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_text_and_images_share_a_batch(served):
    engine, _, _ = served
    params = SamplingParams(max_tokens=CANVAS, seed=5, ignore_eos=True)
    inputs = [
        {"prompt_token_ids": prompt(30)},
        {
            "prompt_token_ids": PROMPTS["in the middle"],
            "multi_modal_data": {"image": [picture(1)]},
        },
        {"prompt_token_ids": prompt(50, salt=2)},
    ]
    engine.reset_prefix_cache()
    alone = [engine.llm.generate([one], params, use_tqdm=False)[0] for one in inputs]
    engine.reset_prefix_cache()
    together = engine.llm.generate(inputs, params, use_tqdm=False)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_asynchronous_scheduling_changes_nothing(checkpoint):
    """In no denoise step of two blocks; an image inside a chunk, and at the end of one."""
    path = checkpoint(**WITH_TOWER)
    engines = [start(path, **OPTIONS) for start in (get_engine, get_async_engine)]
    for ids in (PROMPTS["in the middle"], PROMPTS["across a chunk's end"]):
        runs = []
        for engine in engines:
            engine.reset_prefix_cache()
            output, steps = generate(engine, ids, [picture(1)])
            runs.append((output.outputs[0].token_ids, torch.cat([step.logits for step in steps])))
        (tokens, logits), (tokens_async, logits_async) = runs
        assert tokens_async == tokens and len(logits_async) == len(logits) > 2 * CANVAS
        assert relative_error(logits_async, logits) < RELATIVE_TOLERANCE


@pytest.mark.parametrize("options", [{"vision_config": None}, {}], ids=["no tower", "no processor"])
def test_a_checkpoint_without_images_serves_text_and_says_so(checkpoint, served, options):
    path = checkpoint(**options)
    with pytest.raises(VLLMValidationError, match=r"text-only: .* vision tower; .* Send text"):
        parse_chat(path, MESSAGES)
    engine = get_engine(path, max_num_batched_tokens=ONE_CHUNK)
    params = SamplingParams(max_tokens=CANVAS, seed=5, ignore_eos=True)
    assert engine.generate([prompt(30)], params) == served[0].generate([prompt(30)], params)


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.encoder.embed_vision.embedding_projection.weight",
    ],
)
def test_a_missing_tensor_of_the_tower_stops_the_start(checkpoint, tmp_path, name):
    path = edited(checkpoint(**WITH_TOWER), tmp_path / "edited", lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=f"the checkpoint misses {name}\\. "):
        Engine(path, max_num_batched_tokens=ONE_CHUNK)


def test_extreme_shapes_pass(served):
    """Every shape that the processor lets through has a place in the tower's position table."""
    engine, _, _ = served
    for height, width in ((1, 1), (1, 3000), (3000, 1)):
        image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        output, _ = generate(engine, PROMPTS["first"], [image], num_blocks=1)
        assert len(output.outputs[0].token_ids) == CANVAS


def test_the_triton_kernel_shows_images_what_the_cpu_kernel_does(checkpoint):
    """Run in a process of its own, in Triton's interpreter, which is slow: one denoise step.

    Canvases have the anchored window, and images the symmetric one.
    """
    from tests.support import attention_backend_worker

    path = checkpoint(**WITH_TOWER)
    options = OPTIONS | {"hf_overrides": {"canvas_window": "anchored"}}
    on_cpu = get_engine(path, **options)
    attention_backend_worker.serve_with_triton_kernel()
    ours = get_engine(path, attention_config={"backend": "CUSTOM"}, **options)
    layers = ours.runner.vllm_config.compilation_config.static_forward_context
    backends = {
        layer.attn_backend.get_name() for layer in layers.values() if hasattr(layer, "impl")
    }
    assert backends == {"CUSTOM"}
    ids = [*prompt(80), *PLACEHOLDER, *prompt(9)]  # the image is behind the first window
    logits = [
        generate(engine, ids, [picture(1)], 1, extra_args={"diffusion_max_steps": 1})[1][0].logits
        for engine in (on_cpu, ours)
    ]
    assert relative_error(*logits) < RELATIVE_TOLERANCE
