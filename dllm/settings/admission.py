"""Admits a request, or refuses it with HTTP 400: the message says what to do.

``patches.admission.prepare`` calls these functions, in this order:

    canvases          ``admit``, and when stop tokens and bad words are ids, ``admit_ids``
    token by token    ``admit_next_tokens``, and when they are ids, ``check_sizes``

A value that vLLM's worker cannot hold would raise there, and end the server; and vLLM does not
check that a request leaves at least one token to emit.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from dllm.settings.denoising import NO_TOKEN, DenoiseSettings
from dllm.settings.options import MAX_INT32
from dllm.settings.pins import PIN_AT, PIN_IDS, PIN_MODE, SEED_CANVAS, held_length, holds, pins_of
from dllm.settings.request import (
    CONSTRAINED,
    READ_ONLY,
    WHOLE_CANVAS_ARGS,
    RequestOptions,
    check_integers,
    has_structured_outputs,
    refuse,
    refuse_value,
    shown,
)

if TYPE_CHECKING:
    from vllm import SamplingParams

# Sampling parameters that our sampler does not apply; they are refused.
UNSUPPORTED_PARAMETERS = ("trace_decode_token_ids",)
MOST_STOPS = 1024  # without min_tokens; they are copied for each prompt and sample
# Far beyond any use, and narrow enough that no fp32 logit overflows in the worker.
LARGEST_PENALTY = 1e4
LARGEST_BIAS = 1e6
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def admit(params: "SamplingParams", settings: DenoiseSettings, vocab_size: int) -> RequestOptions:
    """A new request's options. Raises VLLMValidationError, HTTP 400, if it cannot be served."""
    _refuse_unserved(params, settings)
    _check_numbers(params)
    options = RequestOptions.read(params, settings)
    if extra := params.extra_args:
        check_integers(SEED_CANVAS, options.seed_canvas, NO_TOKEN, vocab_size - 1)
        check_integers(PIN_IDS, extra.get(PIN_IDS), 0, vocab_size - 1)
        never = sorted({*(extra.get(PIN_IDS) or ())} & {*settings.never_emitted})
        if never:
            allowed = "tokens that can be emitted, which a mask cannot"
            refuse_value(PIN_IDS, never[0], allowed, "Leave this pin out.")
        if extra.get(CONSTRAINED):
            _check_constrained(params)
    if params.allowed_token_ids == []:
        refuse("allowed_token_ids", "allowed_token_ids is empty; allowed: one and more. Send some.")
    check_integers("allowed_token_ids", params.allowed_token_ids, 0, vocab_size - 1)
    check_integers("logit_bias", params.logit_bias, 0, vocab_size - 1)
    if has_structured_outputs(params):
        _refuse_beside_structured_outputs(params, settings)
    return options


def admit_next_tokens(params: "SamplingParams") -> None:
    """Check a request of a model that is served token by token. Raises as ``admit``."""
    for name in params.extra_args or ():
        if name.startswith("diffusion_"):
            refuse_without_canvases(name)
    _check_numbers(params)


def refuse_beams() -> NoReturn:
    refuse(
        "use_beam_search",
        "use_beam_search = True; allowed: False, because a canvas has no next token to branch on. "
        "Leave it out; n = 2 asks for two samples.",
    )


def refuse_without_canvases(name: str) -> NoReturn:
    """Refuse a parameter about canvases, with HTTP 400, where a model is served token by token."""
    refuse(
        name,
        f"{name} is not served here: this server writes token by token, and has no canvas. Leave "
        "it out, or ask a server with decoding = 'diffusion'.",
    )


def admit_ids(params: "SamplingParams", settings: DenoiseSettings, vocab_size: int) -> None:
    """Refuse edits of logits that cannot be applied exactly, and pins behind the answer's end.

    ``params``: admitted, with stop tokens and bad words as ids, as the worker will get them. Raises
    as ``admit``.
    """
    check_sizes(params)
    allowed = params.allowed_token_ids or []
    stops = params.all_stop_token_ids if params.min_tokens > 0 else set()
    words = params.bad_words_token_ids or []
    # Some token must be possible at every position. A token that ends no bad word always is, unless
    # it is a stop token that `min_tokens` forbids. One such token is enough.
    forbidden = {word[-1] for word in words} | stops | set(settings.never_emitted)
    num_left = len(set(allowed) - forbidden) if allowed else vocab_size - len(forbidden)
    if num_left < 1:
        parameter = "allowed_token_ids" if allowed else "bad_words"
        refuse(
            parameter,
            f"{parameter} leaves no token that may always be emitted; allowed: at least one that "
            "ends no bad word, is no mask and, with min_tokens, no stop token. Remove a "
            "restriction.",
        )
    _refuse_pins_behind_the_end(params)
    if settings.never_emitted:  # among masks
        _refuse_forbidden_hints(params)


def admit_prompt(tokens: Sequence[int], vocab_size: int, parameter: str = "prompt") -> None:
    """Refuse no token, which vLLM does not, and with the range those outside of the vocabulary."""
    if len(tokens) == 0:
        refuse(parameter, "prompt has 0 tokens; allowed: 1 and more. Send a token or a text.")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            refuse(
                parameter,
                f"prompt token id {token} is out of the vocabulary; allowed: 0 to "
                f"{vocab_size - 1}. Send ids of this model's tokenizer (POST /tokenize).",
            )


def check_sizes(params: "SamplingParams") -> None:
    """Refuse more ids of stop tokens and bad words than the worker's tables hold."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_STOP_TOKEN_IDS

    stops = params.all_stop_token_ids if params.min_tokens > 0 else set()
    words = params.bad_words_token_ids or []
    _check_size("stop_token_ids", len(stops), MAX_NUM_STOP_TOKEN_IDS, " beside min_tokens")
    _check_size("bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS)


def _check_numbers(params: "SamplingParams") -> None:
    """Refuse numbers and lists that do not fit the worker's tables: they would end the server."""
    from vllm.v1.worker.gpu.sample import logit_bias

    # Of n samples, vLLM later gives sample i the seed seed + i, which has to fit 64 bits, too.
    check_integers("seed", [params.seed], -(2**63), 2**63 - params.n)
    check_integers("top_k", [params.top_k], -1, MAX_INT32)
    check_integers("max_tokens", [params.max_tokens], 1, MAX_INT32 // 2)
    check_integers("min_tokens", [params.min_tokens], 0, MAX_INT32 // 2)
    check_integers("thinking_token_budget", [params.thinking_token_budget], -1, MAX_INT32)
    check_integers("prompt_logprob_start", [params.prompt_logprob_start], 0, MAX_INT32)
    # The next two cannot be sent to the engine: without a refusal the client would get HTTP 500.
    check_integers("stream_interval", [params.stream_interval], 1, MAX_INT32)
    if (repeated := params.repetition_detection) is not None:
        sizes = repeated.max_pattern_size, repeated.min_pattern_size, repeated.min_count
        check_integers("repetition_detection", sizes, 0, MAX_INT32)
    if not 1 / LARGEST_PENALTY <= params.repetition_penalty <= LARGEST_PENALTY:
        numbers = f"a number from {1 / LARGEST_PENALTY} to {LARGEST_PENALTY}"
        refuse_value("repetition_penalty", params.repetition_penalty, numbers)
    for name, given, at_most in (
        ("allowed_token_ids", params.allowed_token_ids, logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias, logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids", params.stop_token_ids, MOST_STOPS),
    ):
        _check_size(name, len(given or ()), at_most)
    for bias in (params.logit_bias or {}).values():
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            refuse_value("logit_bias", bias, f"a number from {-LARGEST_BIAS} to {LARGEST_BIAS}")


def _refuse_unserved(params: "SamplingParams", settings: DenoiseSettings) -> None:
    """Refuse what the model does not take, or takes only without a value."""
    why = "it writes canvases, not one token after the other"
    unserved = [(name, getattr(params, name), why) for name in UNSUPPORTED_PARAMETERS]
    if settings.block_size > 1:
        why = "every token of a prompt sees itself (so `echo` goes without `logprobs`)"
        names = ("prompt_logprobs", "prompt_logprob_token_ids")
        unserved += [(name, getattr(params, name), why) for name in names]
        why = "a canvas is the rest of a block, or of the answer, and has no width of its own"
        extra = params.extra_args or {}
        unserved += [(name, extra.get(name), why) for name in WHOLE_CANVAS_ARGS]
    for name, value, why in unserved:
        if value is not None and not (isinstance(value, list) and not value):
            refuse(
                name, f"{name} = {shown(value)} is not served for this model: {why}. Leave it out."
            )


def _check_constrained(params: "SamplingParams") -> None:
    if not params.logprob_token_ids:
        refuse(
            CONSTRAINED,
            f"{CONSTRAINED} = true without logprob_token_ids; allowed: with them, they are the "
            "tokens it is constrained to. Send both, or omit both.",
        )
    if params.allowed_token_ids:
        refuse(
            CONSTRAINED,
            f"{CONSTRAINED} = true beside allowed_token_ids; allowed: one of them, both say which "
            "tokens may be emitted. Leave one out.",
        )


def _refuse_forbidden_hints(params: "SamplingParams") -> None:
    """Refuse hints that may not be emitted, where what is given stays on its canvas."""
    extra = params.extra_args or {}
    pins = pins_of(extra)
    allowed, stops = params.allowed_token_ids, params.all_stop_token_ids
    ends = {word[-1] for word in params.bad_words_token_ids or ()}
    for place, token in (dict(enumerate(extra.get(SEED_CANVAS) or ())) | pins).items():
        if token == NO_TOKEN or (holds(extra) and place in pins):
            continue
        for name, is_forbidden in (
            ("allowed_token_ids", allowed and token not in allowed),
            ("bad_words", token in ends),
            ("min_tokens", place < params.min_tokens and token in stops),
        ):
            if is_forbidden:
                given = PIN_IDS if place in (extra.get(PIN_AT) or ()) else SEED_CANVAS
                let = f"what {name} allows, because here a hint is emitted"
                refuse_value(given, token, let, f"Leave it out; {PIN_MODE} = 'hold' emits any pin.")


def _refuse_beside_structured_outputs(params: "SamplingParams", settings: DenoiseSettings) -> None:
    """Refuse what may contradict a grammar, or has no meaning beside one."""
    extra = params.extra_args or {}
    asked = params.structured_outputs
    kind = next(kind for kind in GRAMMAR_KINDS if getattr(asked, kind, None) is not None)
    kind += ", as tools have" if kind == "structural_tag" else ""
    stays = bool(settings.never_emitted)  # among masks
    seeded = any(token != NO_TOKEN for token in extra.get(SEED_CANVAS) or ())
    for name, is_given, why in (
        ("ignore_eos", params.ignore_eos, "the answer ends where the text is complete"),
        ("min_tokens", params.min_tokens > 0, "the grammar says how short a text may be"),
        ("allowed_token_ids", params.allowed_token_ids, "the two may leave no text"),
        ("bad_words", params.bad_words, "the two may leave no text"),
        (READ_ONLY, extra.get(READ_ONLY), "a canvas that is only read has no answer"),
        (PIN_MODE, holds(extra), "the grammar may have no text with the tokens that are held"),
        (PIN_AT, stays and pins_of(extra), "here a hint is emitted, and may fit no text"),
        (SEED_CANVAS, stays and seeded, "here a given token is emitted, and may fit no text"),
        (CONSTRAINED, extra.get(CONSTRAINED), "both say which tokens may be emitted"),
    ):
        if is_given:
            refuse(
                name, f"{name} beside structured outputs ({kind}): {why}. Leave one of them out."
            )


def _refuse_pins_behind_the_end(params: "SamplingParams") -> None:
    extra = params.extra_args or {}
    pins = pins_of(extra) if holds(extra) else {}
    length = held_length(pins, params.all_stop_token_ids)
    held = f"{PIN_MODE} = 'hold' with a pin at {length}"
    if pins and params.max_tokens is not None and length >= params.max_tokens:
        refuse(
            PIN_MODE,
            f"{held} and max_tokens = {params.max_tokens}; allowed: max_tokens of at least "
            f"{length + 1}. Raise it, or leave the pin out.",
        )
    if pins.get(length) in params.all_stop_token_ids and length < params.min_tokens:
        refuse(
            PIN_MODE,
            f"{held} that ends the answer, and min_tokens = {params.min_tokens}; allowed: "
            f"min_tokens of at most {length}. Lower it, or leave the pin out.",
        )


def _check_size(name: str, size: int, at_most: int, where: str = "") -> None:
    if size > at_most:
        refuse(
            name, f"{name} comes to {size} tokens{where}; allowed: at most {at_most}. Send fewer."
        )
