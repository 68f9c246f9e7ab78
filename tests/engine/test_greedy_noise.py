"""A greedy request without a seed draws its noise from its prompt: the same text every time."""

from collections.abc import Sequence
from random import Random

from vllm import SamplingParams

from bench.toys.suite import FAMILIES, questions
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_harness import Engine, get_engine
from tests.support.process import ROOT

NUM_PROMPTS, NUM_BATCHES = 8, 25
GREEDY = SamplingParams(temperature=0, max_tokens=2 * CANVAS)
SAMPLED = SamplingParams(max_tokens=CANVAS // 2, ignore_eos=True)


def num_equal(engine: Engine, prompts: Sequence[list[int]]) -> int:
    """How many texts in batches, beside sampled requests of other lengths, are those of alone."""
    alone = [engine.generate([one], GREEDY)[0] for one in prompts]
    assert alone == [engine.generate([one], GREEDY)[0] for one in prompts]
    dice, num_equal = Random(0), 0
    for _ in range(NUM_BATCHES):
        others = [prompt(dice.randrange(5, 90), salt=dice.randrange(99)) for _ in range(3)]
        asked = [(one, GREEDY) for one in prompts] + [(one, SAMPLED) for one in others]
        order = dice.sample(range(len(asked)), len(asked))
        texts = engine.generate([asked[i][0] for i in order], [asked[i][1] for i in order])
        found = dict(zip(order, texts, strict=True))
        num_equal += sum(found[place] == text for place, text in enumerate(alone))
    return num_equal


def test_the_same_prompt_has_the_same_text_alone_and_in_every_batch(engine: Engine) -> None:
    """In fp32 on a CPU."""
    prompts = [prompt(9 + 5 * number, salt=number) for number in range(NUM_PROMPTS)]
    assert num_equal(engine, prompts) == NUM_PROMPTS * NUM_BATCHES


def test_in_bf16_the_same_prompt_has_the_same_text_alone() -> None:
    """Prints the share in batches, where matrix products of other sizes round otherwise."""
    engine = get_engine(ROOT / "checkpoints/tiny-dllm", dtype="bfloat16", max_num_seqs=8)
    tokenizer = engine.llm.get_tokenizer()
    asked = questions(FAMILIES, "heldout", 1)[:NUM_PROMPTS]
    chats = [[{"role": "user", "content": one.prompt}] for one in asked]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    share = num_equal(engine, prompts) / (NUM_PROMPTS * NUM_BATCHES)
    print(f"bf16: {share:.1%} of the texts in batches are those of alone")


def test_other_prompts_and_sampled_requests_have_other_noise(engine: Engine) -> None:
    """Of their first canvases."""
    with engine.watch() as watched:
        engine.generate([prompt(20), prompt(20, salt=1)], GREEDY)
        engine.generate([prompt(20)] * 2, SAMPLED)
    canvases = {tuple(steps[0].canvas) for steps in watched.values()}
    assert len(canvases) == 4
