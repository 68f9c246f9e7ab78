"""How a canvas is read for a question: one denoise step, and the log-probabilities of the labels.

Each question is a request of its own, for each of its samples. So an answer depends neither on what
else is asked nor on who else asks. Questions on one input share its prefix in the KV cache.

The label positions are noise or masks, as the model's canvases begin. What is behind them is the
token that ends a reply; with blocks it is masks to the end of the block.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from vllm.utils.async_utils import make_async

from dllm.api import engine_requests
from dllm.api.decisions.labels import Labels, OptionLabels, written
from dllm.api.decisions.protocol import MAX_OPTIONS, MAX_QUESTIONS
from dllm.api.engine_requests import FAILED, at_once, read_params, reader
from dllm.settings.decisions import DecisionOptions, QuestionType
from dllm.settings.denoising import DenoiseSettings, unread_canvases
from dllm.settings.request import refuse
from dllm.settings.server import options_of
from dllm.settings.vllm_names import question_types, strategies

# The most that one HTTP request may ask for, over all of its questions.
MAX_CANVASES = 1600  # 400 questions of 4 samples
MAX_CHARACTERS = 8_000_000  # of all prompts, times samples
# The log-probability of a token that a model never says, for instance the mask. It is finite, so
# that labels of such tokens alone have probabilities, too.
NEVER = -9999.0
THOUGHT_BEGINS, THOUGHT_ENDS = "<|channel>", "<channel|>"
TYPE_OF: dict[str, QuestionType] = {"noul": "predicate", "choice": "choice", "score": "score"}


@dataclass
class Read(strategies.QuestionRead):
    """What a question's canvases say; ``probs`` and ``label_mass`` are means over them."""

    cached_tokens: int = 0  # of ``input_tokens``, those that were in the KV cache
    standard_errors: tuple[float, ...] = ()  # of each probability; 0 for one sample
    samples: int = 1

    @property
    def hesitation(self) -> float:
        """Entropy of the probabilities over that of a tie: 0 is certain, 1 is a guess."""
        entropy = -sum(p * math.log(p) for p in self.probs if p > 0)
        return entropy / math.log(len(self.probs)) if len(self.probs) > 1 else 0.0


class WideChoice(question_types.ChoiceQuestion):
    """vLLM's choice, for as many options as OpenAI's."""

    label_set = tuple(map(str, range(MAX_OPTIONS)))  # counted only: ``Labels`` has the labels


class WideScore(question_types.ScoreQuestion):
    """vLLM's score, for as many levels."""

    label_set = tuple(map(str, range(MAX_OPTIONS)))


class CanvasReads(strategies.NextTokenStrategy):
    """vLLM's interface of strategies, for every family that this plugin serves."""

    joint_reads = True  # so that vLLM's /v1/systemone asks num_requests, which says why not

    def __init__(self, context: strategies.ReadContext, settings: DenoiseSettings) -> None:
        """Raises ValueError if the served model cannot be asked."""
        strategies.ReadStrategy.__init__(self, context)
        if (why := unread_canvases(settings)) is not None:
            raise ValueError(f"Typed decisions read canvases of masks, and {why}")
        config = context.engine_client.vllm_config
        self.options: DecisionOptions = options_of(config).decisions
        self.settings = settings
        self.block_size = settings.block_size
        self.width = min(self.options.read_width, config.diffusion_config.canvas_length)
        self.max_model_len = config.model_config.max_model_len
        if config.model_config.is_multimodal_model:
            self.modalities = frozenset({"image"})
        try:
            self._prompt_end = self._generation_prompt()
            self.tail = strategies.prompt_tail(self._tokenizer(), self._prompt_end)
            self.end = int(self._tokenizer().eos_token_id)
            self.labels = self._labels()
        except Exception as error:  # a template may raise anything
            raise ValueError(
                "Typed decisions need a chat template that writes a prompt for a reply, and a "
                f"tokenizer with a token for its end: {error}"
            ) from error

    def limits(self) -> strategies.DecisionLimits:
        return strategies.DecisionLimits(max_questions=MAX_QUESTIONS, max_options=MAX_OPTIONS)

    def num_requests(
        self, questions: Sequence[Any], joint: bool = False, samples: int | None = None
    ) -> int:
        """One each where canvases have no noise. Raises VLLMValidationError for ``joint`` ones."""
        if joint:
            refuse(
                "joint",
                "joint = true; allowed: false. Questions on one canvas change each other's "
                "probabilities. Send them without joint.",
            )
        has_noise = not self.settings.never_emitted
        return len(questions) * ((samples or self.options.samples) if has_noise else 1)

    @cached_property
    def thought(self) -> list[int]:
        """The tokens of an empty thought, if the model thinks and its template writes none."""
        tokenizer = self._tokenizer()
        if THOUGHT_BEGINS not in tokenizer.get_added_vocab():
            return []
        if THOUGHT_ENDS in tokenizer.decode(self._prompt_end[-4:]):
            return []
        return list(
            tokenizer.encode(f"{THOUGHT_BEGINS}thought\n{THOUGHT_ENDS}", add_special_tokens=False)
        )

    def _labels(self) -> Labels:
        """The labels in the tokens that the model's tokenizer writes behind a prompt."""
        tokenizer = self._tokenizer()
        tail = strategies.prompt_tail(tokenizer, [*self._prompt_end, *self.thought])
        before = tokenizer.decode(tail)
        size = self.context.engine_client.vllm_config.model_config.get_vocab_size()
        if self.end >= size:
            raise ValueError(f"its token {self.end} is outside of the vocabulary of {size} tokens")

        def encode(text: str) -> list[int] | None:
            ids = list(tokenizer.encode(before + text, add_special_tokens=False))
            is_known = ids[: len(tail)] == tail and max(ids) < size
            return ids[len(tail) :] if is_known else None

        if self.block_size == 1:
            return Labels(encode, self.end)
        texts = (tokenizer.decode([token]) for token in sorted(tokenizer.get_vocab().values()))
        return Labels(encode, self.end, (text for text in texts if _is_word(text)))

    def labels_of(self, question: question_types.Question) -> OptionLabels:
        """Raises VLLMValidationError: there are none."""
        names = [option.name for option in question.options]
        try:
            if question.type.name == "noul":
                return self.labels.yes_no()
            return (self.labels.levels if question.type.name == "score" else self.labels.choices)(
                names
            )
        except ValueError as error:
            refuse("questions", f"question {question.id!r}: {error}. Send other options.")

    async def read(
        self,
        questions: Sequence[question_types.Question],
        instructions: str | None,
        state: str,
        *,
        request_id: str,
        chat_template_kwargs: dict[str, Any] | None,
        lora_request: Any,
        priority: int,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        media: Mapping[str, Sequence[str]] | None = None,
        samples: int | None = None,
    ) -> list[Read]:
        """In order. Raises VLLMValidationError: a prompt, an option or the whole is too long."""
        given = self._read_request(chat_template_kwargs, cache_salt)
        drawn = self.num_requests([None], samples=samples)
        off_the_loop = make_async(self._plan, self.context.online_renderer.renderer._executor)
        plans = await off_the_loop(questions, state, drawn)
        images = await self._image_parts((media or {}).get("image", ()))
        asked = []
        for plan in plans:
            content = [*images, {"type": "text", "text": plan.text}] if images else plan.text
            messages = [{"role": "user", "content": content}]
            if instructions:
                messages.insert(0, {"role": "system", "content": instructions})
            engine_input, prompt_ids = await self._render(given, messages)
            self._check_end(prompt_ids)
            ids = [*prompt_ids, *self.thought]
            self._check_room(plan.question, len(ids))
            asked.append((plan, {**engine_input, "prompt_token_ids": ids}))
        options = dict(lora_request=lora_request, trace_headers=trace_headers, priority=priority)
        read = reader(self.context.engine_client, options)
        return await at_once(
            self._answer(plan, engine_input, drawn, f"{request_id}-{place}", read)
            for place, (plan, engine_input) in enumerate(asked)
        )

    async def _image_parts(self, urls: Sequence[str]) -> list[dict[str, Any]]:
        """As in vLLM, but an image that cannot be fetched is an error of the client."""
        try:
            return await super()._image_parts(urls)
        except Exception as error:  # of the client's URL: of the network, or of what is there
            refuse("input", f"an image of the input: {error}. Send it as a data: URL.")

    async def _answer(
        self, plan: "_Plan", engine_input: Any, samples: int, name: str, read: engine_requests.Read
    ) -> Read:
        params = self._params(plan, engine_input["prompt_token_ids"], samples)
        results = await at_once(
            read(engine_input, one, f"{name}-{part}") for part, one in enumerate(params)
        )
        return self._result(plan, results)

    def _plan(
        self, questions: Sequence[question_types.Question], state: str, samples: int
    ) -> list["_Plan"]:
        plans = []
        for question in questions:
            labels = self.labels_of(question)
            _check_length(question, labels, self.width)
            text = f"{state}\n\n{written(question, labels)}"
            plans.append(_Plan(question, labels, text))
        length = sum(len(plan.text) for plan in plans) * samples
        if length > MAX_CHARACTERS:
            refuse(
                "questions",
                f"questions: each is read behind the input; with samples they come to {length} "
                f"characters; allowed: {MAX_CHARACTERS} in an HTTP request. Send several requests.",
            )
        canvases = sum(len(plan.parts) for plan in plans) * samples
        if canvases > MAX_CANVASES:
            refuse(
                "questions",
                f"questions: they come to {canvases} canvases; allowed: {MAX_CANVASES} in an HTTP "
                "request. Send several requests, or fewer samples.",
            )
        return plans

    def _check_end(self, prompt_ids: list[int]) -> None:
        """Refuse options of the chat template that end the prompt in another way."""
        # Without a token that marks turns, nothing says where the end begins.
        is_known = len(self.tail) < len(self._prompt_end)
        if is_known and prompt_ids[len(prompt_ids) - len(self.tail) :] != self.tail:
            refuse(
                "chat_template_kwargs",
                "chat_template_kwargs end the prompt in another way, so that the labels' tokens "
                "are unknown. Leave them out.",
            )

    def _check_room(self, question: question_types.Question, num_tokens: int) -> None:
        width = self.width
        if self.block_size > 1:
            width = self.block_size - num_tokens % self.block_size
        if num_tokens + width > self.max_model_len:
            refuse(
                "input",
                f"question {question.id!r}: input and question have {num_tokens} tokens and "
                f"the canvas {width}; allowed: {self.max_model_len} together. Send less.",
            )

    def _params(
        self, plan: "_Plan", prompt_ids: list[int], samples: int
    ) -> Iterator[SamplingParams]:
        """By sample, and in it by part of the label tokens; parts have one canvas, and so its
        logits.
        """
        rows = plan.labels.num_rows
        # The same question has the same noise.
        digest = hashlib.blake2b(json.dumps(prompt_ids).encode(), digest_size=6).digest()
        extra: dict[str, Any] = dict(self.settings.one_step)
        if self.block_size == 1:
            extra |= {
                "diffusion_seed_canvas": [-1] * rows + [self.end] * (self.width - rows),
                "diffusion_canvas_length": self.width,
                "diffusion_read_only": True,
            }
        for place in range(samples * len(plan.parts)):
            sample, part = divmod(place, len(plan.parts))
            seed = int.from_bytes(digest, "big") + sample
            # Each is sent once, so vLLM need not copy it deeply.
            yield read_params(rows, plan.parts[part], extra, seed=seed, skip_clone=True)

    def _result(self, plan: "_Plan", results: list[RequestOutput]) -> Read:
        temperature = self.options.temperature.get(TYPE_OF[plan.question.type.name], 1.0)
        probs, masses, found = [], [], False
        for start in range(0, len(results), len(plan.parts)):
            outputs = [one.outputs[0] for one in results[start : start + len(plan.parts)]]
            rows: list[dict[int, float]] = [{} for _ in range(plan.labels.num_rows)]
            for output, part in zip(outputs, plan.parts, strict=True):
                assert output.logprobs is not None
                for row, given in zip(rows, output.logprobs, strict=False):
                    row |= {token: max(given[token].logprob, NEVER) for token in part}
            sums = [
                sum(rows[at][token] for at, token in enumerate(one)) for one in plan.labels.tokens
            ]
            if not all(map(math.isfinite, sums)):
                raise GenerationError(FAILED)
            probs.append(question_types.label_softmax([one / temperature for one in sums]))
            masses.append(min(1.0, sum(map(math.exp, sums))))
            said = tuple(outputs[0].token_ids)
            found |= any(said[: len(one)] == one for one in plan.labels.tokens)
        means = [sum(column) / len(probs) for column in zip(*probs, strict=True)]
        return Read(
            probs=means,
            label_mass=sum(masses) / len(masses),
            argmax_is_label=found,
            input_tokens=len(results[0].prompt_token_ids or ()),
            output_tokens=1,
            cached_tokens=results[0].num_cached_tokens or 0,
            standard_errors=tuple(map(_standard_error, zip(*probs, strict=True))),
            samples=len(probs),
        )


@dataclass(frozen=True)
class _Plan:
    question: question_types.Question
    labels: OptionLabels
    text: str

    @cached_property
    def parts(self) -> list[list[int]]:
        """The different label tokens, in parts for which vLLM gives log-probabilities at once."""
        tokens = sorted({token for one in self.labels.tokens for token in one})
        step = MAX_LOGPROB_TOKEN_IDS
        return [tokens[start : start + step] for start in range(0, len(tokens), step)]


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()


def _check_length(question: question_types.Question, labels: OptionLabels, width: int) -> None:
    if labels.num_rows > width:
        refuse(
            "questions",
            f"question {question.id!r}: an option has {labels.num_rows} tokens with the end; "
            f"allowed here: {width}. Send shorter options.",
        )


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
