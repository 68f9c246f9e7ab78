"""``dllm quantize``: what it refuses, what a run that fails leaves, what LLM Compressor wrote."""

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import convert_checkpoint
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from dllm.cli import CommandError
from dllm.prompts.files import BUNDLED
from dllm.quant.checks import is_scale
from dllm.quant.schemes import parse_plan
from dllm.quantize import command
from dllm.quantize.checkpoint import INDEX, Checkpoint
from dllm.quantize.convert import Fused
from dllm.quantize.job import Job, calibration_prompts, prepare
from dllm.quantize.linears import by_one_name, linears
from dllm.quantize.make import RUN, main, make
from dllm.quantize.verify import verify
from dllm.settings import files
from tests.support.edited import Edit, edited
from tests.support.patience import HANG_S
from tests.support.process import run_python, start_python
from tests.support.quant_checkpoints import quantize as quantize_by_hand

pytestmark = pytest.mark.slow

COMMAND = ("-m", "dllm.cli", "quantize")
SMALL = {"layer_types": ["sliding_attention", "full_attention"]}
SCHEMES = ("fp8-dynamic", "nvfp4")
SAMPLES, BLOCKS, SEED = 2, 1, 5
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path]) -> Path:
    """A random checkpoint in fp32: every rounding in these tests is a quantizer's."""
    return checkpoint(**SMALL)


def small_job(source: Path, out: Path, scheme: str = "nvfp4", *options: str) -> Job:
    return prepare([str(source), "--scheme", scheme, "--out", str(out), *options])[0]


class HandMade:
    """A quantizer in LLM Compressor's place, from definitions; ``stop_at`` interrupts it."""

    def __init__(self, job: Job, stop_at: str = "nowhere") -> None:
        self.scheme = job.scheme.name
        self.stop_at = stop_at
        self.seen: list[str] = []

    def quantize(
        self, weights: dict[str, torch.Tensor], input_scale: torch.Tensor | None
    ) -> dict[str, dict[str, torch.Tensor]]:
        if any(self.stop_at in name for name in weights):
            raise KeyboardInterrupt
        self.seen += weights
        largest = max(float(weight.abs().max()) for weight in weights.values())
        parts = {}
        for name, weight in weights.items():
            parts[name] = quantize_by_hand(weight, self.scheme, 448 * 6 / largest)
            if input_scale is not None:
                parts[name]["input_global_scale"] = input_scale.clone()
        return parts

    def measure(self, job: Job) -> dict[str, torch.Tensor]:
        return {layer.module: torch.tensor([300.0]) for layer in job.layers}

    def write(self, job: Job, source: Path, input_scales: dict[str, torch.Tensor]) -> None:
        convert_checkpoint(source, job.out, Fused(job, self.quantize, input_scales))


def write(job: Job, hands: HandMade | None = None) -> HandMade:
    hands = hands or HandMade(job)
    make(job, hands.write, hands.measure)
    return hands


def tree(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# --------------------------------------------------------------------------------------------------
# Interrupted, refused


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_interrupted_run_leaves_nothing(source: Path, tmp_path: Path, scheme: str) -> None:
    job = small_job(source, tmp_path / "out", scheme)
    with pytest.raises(KeyboardInterrupt):
        write(job, HandMade(job, stop_at="layers.1.mlp"))
    assert list(tmp_path.iterdir()) == []
    write(job)
    assert list(tmp_path.iterdir()) == [job.out]
    assert oct(job.out.stat().st_mode) == oct(job.source.path.stat().st_mode)


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    out, aside = tmp_path / "out", tmp_path / "aside"
    job = small_job(source, out)
    aside.mkdir()
    (aside / "precious").write_text("mine")

    class Slow(HandMade):
        def measure(self, job: Job) -> dict[str, torch.Tensor]:
            aside.rename(out)  # after the first look
            return super().measure(job)

    for late in (lambda: write(job, Slow(job)), lambda: small_job(source, out)):
        with pytest.raises(CommandError, match="exists, and nothing is overwritten"):
            late()
    assert tree(out) == {"precious": b"mine"} and list(tmp_path.iterdir()) == [out]


def test_a_place_that_is_not_there_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"there is no directory .*/none\."):
        small_job(source, tmp_path / "none" / "out")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The system refuses to let a file of this process grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_that_looks_whole(source: Path, tmp_path: Path) -> None:
    job = small_job(source, tmp_path / "out")
    with largest_file(100_000), pytest.raises(CommandError, match="File too large") as ended:
        write(job)
    assert "\n" not in str(ended.value)
    assert list(tmp_path.iterdir()) == []


def assert_holds_no(path: Path, prompts: list[str]) -> None:
    """No file of a checkpoint holds one of these texts, as it is or as JSON writes it."""
    assert prompts
    for text in prompts:
        forms = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        for file in path.rglob("*"):
            found = file.read_bytes() if file.is_file() else b""
            assert not any(form.encode() in found for form in forms), file


def test_a_checkpoint_holds_nothing_of_what_it_was_calibrated_with(
    source: Path, tmp_path: Path
) -> None:
    prompts = ['Sophie\'s "invoice" is overdue.', "Zahlt Grüße zurück?\nJa."]
    lines = [json.dumps({"prompt": prompts[0]}), json.dumps({"prompt": prompts[1]})]
    records = []
    for number in (1, 2):
        file, out = tmp_path / f"{number}.jsonl", tmp_path / f"out-{number}"
        file.write_text("\n".join(lines[:number]))
        write(small_job(source, out, "nvfp4", "--calibration", str(file)))
        assert_holds_no(out, prompts)
        records.append(json.loads((out / RUN).read_text())["calibration"])
    assert [record["prompts"] for record in records] == [1, 2]
    assert records[0]["sha256"] != records[1]["sha256"]


LAYER = "model.decoder.layers.1."


def put(name: str, value: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({name: value})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{LAYER}mlp.up_proj.weight"), "misses .*layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop(f"{LAYER}experts.down_proj"), "misses .*layers.1.experts.down_proj"),
        (
            put(f"{LAYER}mlp.up_proj.weight", torch.zeros(8, 128)),
            r"layers.1.mlp.up_proj.weight has shape \[8, 128\]; config.json makes it \[128, 128\]",
        ),
        (
            put(f"{LAYER}experts.down_proj", torch.zeros(4, 128, 32).char()),
            "experts.down_proj is torch.int8; to quantize, weights have to be bfloat16",
        ),
        # These are found while the layer is quantized.
        (
            lambda t: t[f"{LAYER}mlp.up_proj.weight"][3].fill_(NAN),
            "layers.1.mlp.up_proj holds a weight that is not finite",
        ),
        (
            lambda t: t[f"{LAYER}experts.gate_up_proj"][2, 40:].fill_(INF),
            "layers.1.experts.2.up_proj holds a weight that is not finite",
        ),
        (
            put(f"{ENCODER}layers.1.mlp.up_proj.weight", torch.ones(128, 128)),
            "layers.1.mlp.up_proj.weight and .* are one weight of the model and differ",
        ),
        (
            put(f"{ENCODER}layers.1.router.scale", torch.ones(128)),
            "layers.1.router.scale and .* are one weight of the model and differ",
        ),
    ],
)
def test_a_wrong_source_is_refused_with_the_tensor_named(
    source: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        write(small_job(edited(source, tmp_path / "broken", edit), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, 1.0])
def test_a_wrong_scale_stops_the_run(source: Path, tmp_path: Path, value: float) -> None:
    """1 is what LLM Compressor writes, in silence, for what calibration has never seen."""
    job = small_job(source, tmp_path / "out")

    class Uncalibrated(HandMade):
        def measure(self, job: Job) -> dict[str, torch.Tensor]:
            scales = super().measure(job)
            return scales | {f"{DECODER}layers.0.experts.1.down_proj": torch.tensor([value])}

    with pytest.raises(CommandError, match=r"layers.0.experts.1.down_proj.input_global_scale"):
        write(job, Uncalibrated(job))
    assert not job.out.exists()


def test_one_copy_is_written_of_a_source_with_two(
    checkpoint: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    write(small_job(checkpoint(encoder_copies=True, **SMALL), tmp_path / "two", "fp8-dynamic"))
    write(small_job(source, tmp_path / "one", "fp8-dynamic"))
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_a_group_size_that_does_not_fit_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    odd = checkpoint(moe_intermediate_size=24, **SMALL)
    with pytest.raises(
        CommandError, match=r"groups of 16 inputs, and .*experts.0.down_proj has 24"
    ):
        small_job(odd, tmp_path / "out")
    write(small_job(odd, tmp_path / "out", "fp8-dynamic"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scheme", "fp8-dynamic", "--calibration", "x.jsonl"], "--calibration is of no use"),
        (["--scheme", "nvfp4", "--calibration", "no.jsonl"], "--calibration no.jsonl"),
        (["--scheme", "nvfp4", "--ignore", "q_proj"], "--ignore q_proj: no layer .* called so"),
        (["--scheme", "nvfp4", "--ignore", "re:.*layers.7.*"], "layers.7.*: no layer"),
        (["--scheme", "nvfp4", "--ignore", "re:.*("], "no pattern"),
        (["--scheme", "nvfp4", "--ignore", "re:model.*"], "has to begin with re:"),
        (["--scheme", "nvfp4", "--ignore", "re:.*decoder.layers.0.*"], "in front of `layers.`"),
        (["--scheme", "nvfp4", "--ignore", "re:.*q_proj"], "q_proj, but not .*: vLLM computes"),
        (["--scheme", "nvfp4", "--ignore", "re:.*experts.1.*"], "experts.1.*, but not .*experts.0"),
        (["--scheme", "nvfp4", "--ignore", "re:.*"], "no layer to quantize"),
    ],
)
def test_a_wrong_command_line_is_one_clear_sentence(
    source: Path, tmp_path: Path, argv: list[str], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        prepare([str(source), "--out", str(tmp_path / "out"), *argv])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_to_ignore_are_copied_and_stand_in_the_list(
    source: Path, tmp_path: Path, scheme: str
) -> None:
    ignored = [r"re:.*layers\.1\..*", f"{DECODER}layers.0.self_attn.o_proj"]
    options = [f"--ignore={one}" for one in ignored]
    job = small_job(source, tmp_path / "out", scheme, *options)
    hands = write(job)
    assert hands.seen and all(".layers.0." in name for name in hands.seen)
    assert f"{DECODER}layers.0.self_attn.o_proj" not in hands.seen
    found = verify(Checkpoint(job.out), Checkpoint(source), lambda: None)
    assert not found.problems
    recorded = json.loads((job.out / RUN).read_text())["not_quantized"]
    assert set(ignored) < set(recorded)


def copied(source: Path, target: Path, edit: Callable[[Path], object]) -> Path:
    shutil.copytree(source, target)
    edit(target)
    return target


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (
            lambda path: (path / "config.json").write_text('{"architectures": ["LlamaForCausal"]}'),
            "LlamaForCausal.*supported: DiffusionGemmaForBlock",
        ),
        (lambda path: os.truncate(path / "model.safetensors", 50_000), "cannot be read .* cut sh"),
        (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (
            lambda path: (path / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "names b.safetensors, which is not there",
        ),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json or"),
    ],
)
def test_a_source_that_cannot_be_quantized_is_refused(
    source: Path, tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        small_job(copied(source, tmp_path / "other", edit), tmp_path / "out")


# --------------------------------------------------------------------------------------------------
# Calibration prompts


def test_without_a_file_the_shipped_prompts_are_answered() -> None:
    shipped = [json.loads(line) for line in BUNDLED.read_text().splitlines()]
    found = calibration_prompts(None, 64)
    assert [messages[-1]["content"] for messages in found] == [
        line.get("prompt") or line["messages"][-1]["content"] for line in shipped[:64]
    ]
    assert {line["domain"] for line in shipped[:64]} == {line["domain"] for line in shipped}


def test_prompts_come_from_a_file_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    answered = [*talk, {"role": "assistant", "content": "as data sets have it"}]
    file.write_text(
        json.dumps({"prompt": "hi"}) + "\n\n" + json.dumps({"messages": answered, "id": 7}) + "\n"
    )
    assert calibration_prompts(file, 5) == [[{"role": "user", "content": "hi"}], talk]
    assert len(calibration_prompts(file, 1)) == 1
    nobody = json.dumps({"messages": [{"role": "assistant", "content": "b"}]})
    wrong = ("{", '"text"', '{"text": "x"}', '{"prompt": ""}', '{"messages": [{"role": "u"}]}')
    for line in (*wrong, nobody, '{"messages": []}'):
        file.write_text('{"prompt": "fine"}\n' + line + "\n")
        with pytest.raises(CommandError, match=f"{re.escape(str(file))}, line 2"):
            calibration_prompts(file, 5)


# --------------------------------------------------------------------------------------------------
# The environment


def test_the_environment_is_named_made_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.find_python(Path(sys.executable)) == Path(sys.executable)
    with pytest.raises(CommandError, match="there is no such file"):
        command.find_python(tmp_path / "python")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(CommandError, match=r"pip install 'llmcompressor.*--python"):
        command.find_python(None)
    (tmp_path / "Makefile").write_text("setup-quant:\n\tfalse\n")
    with pytest.raises(CommandError, match="`make setup-quant` failed; run it in"):
        command.find_python(None)
    (tmp_path / "Makefile").write_text(
        "setup-quant:\n\tmkdir .venv-quant && touch .venv-quant/.locked\n"
    )
    assert command.find_python(None) == tmp_path / ".venv-quant/bin/python"


def test_nothing_is_left_where_the_command_is_terminated(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In LLM Compressor's place something that writes a file, and gets a signal."""

    def write(job: Job, source: Path, input_scales: object) -> None:
        (job.out / "model.safetensors").touch()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "dllm.quantize.compressor", SimpleNamespace(write=write))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            main([str(source), "--scheme=fp8-dynamic", f"--out={tmp_path / 'out'}"])
    finally:
        signal.signal(signal.SIGTERM, before)
        torch.set_grad_enabled(True)
    assert list(tmp_path.iterdir()) == []


def test_the_packages_of_the_environment_fit_each_other() -> None:
    python = command.find_python(None)
    found = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


# --------------------------------------------------------------------------------------------------
# What LLM Compressor writes, through the real command


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The source, quantized once by a scheme, which spends ten seconds on imports."""
    out = tmp_path_factory.mktemp("quantized")
    calibrated = [f"--samples={SAMPLES}", f"--blocks={BLOCKS}", f"--seed={SEED}"]

    @functools.cache
    def quantized(scheme: str) -> Path:
        options = ("--scheme", scheme, "--out", str(out / scheme), *calibrated)
        assert "peak memory" in run_python(*COMMAND, str(source), *options).stdout
        return out / scheme

    return quantized


# What rounding does to the source's normally distributed weights, layer by layer: FP8 2.37% (32
# inputs) to 2.61%, NVFP4 9.1% to 9.8%.
@pytest.mark.parametrize(
    ("scheme", "low", "high"), [("fp8-dynamic", 0.023, 0.027), ("nvfp4", 0.09, 0.1)]
)
def test_every_weight_is_as_far_from_the_source_as_its_format_rounds(
    made: Callable[[str], Path], source: Path, scheme: str, low: float, high: float
) -> None:
    report = verify(Checkpoint(made(scheme)), Checkpoint(source), lambda: None)
    assert (report.problems, report.notes, report.outliers) == ([], [], {})
    assert report.schemes == {scheme: len(report.errors)}
    assert low < min(report.errors.values()) and max(report.errors.values()) < high


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_output_has_one_copy_of_everything_and_what_serving_needs(
    made: Callable[[str], Path], source: Path, scheme: str
) -> None:
    checkpoint = Checkpoint(made(scheme))
    assert all(len(copies) == 1 for copies in by_one_name(checkpoint).values())
    plan = parse_plan(checkpoint.config["quantization_config"])
    layers = {layer.module: plan.scheme_of(layer.module) for layer in linears(checkpoint.config)}
    kept = {module for module, found in layers.items() if found is None}
    routers = {f"{DECODER}layers.{i}.router.proj" for i in (0, 1)}
    inner = {f"{DECODER}self_conditioning.{n}_proj" for n in ("gate", "up", "down")}
    assert kept == routers | inner
    for module in kept:
        assert checkpoint.tensors[f"{module}.weight"].dtype == torch.float32
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (made(scheme) / name).read_bytes() == (source / name).read_bytes()
    config = dict(checkpoint.config)
    config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    record = json.loads((made(scheme) / RUN).read_text())
    assert record["scheme"] == scheme and all(record["not_quantized"].values())
    assert record["made_with"]["llmcompressor"].startswith("0.14.")
    asked = calibration_prompts(None, SAMPLES)
    assert_holds_no(made(scheme), [messages[-1]["content"] for messages in asked])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_compressor_and_the_definitions_agree(
    made: Callable[[str], Path], source: Path, scheme: str
) -> None:
    """Its codes and scales are those of ``naive_formats``, which was written from definitions."""
    job = small_job(source, made(scheme).with_name(f"{scheme} by hand"), scheme)
    write(job)
    ours, theirs = Checkpoint(job.out), Checkpoint(made(scheme))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        if name.endswith("input_global_scale"):
            continue
        mine, given = ours.tensors[name].float(), tensor.float()
        assert mine.shape == given.shape
        if is_scale(name) and tensor.dtype == torch.float32:
            torch.testing.assert_close(mine, given, rtol=1e-6, atol=0)  # one rounding in fp32
        else:  # a scale one rounding away moves a value that lies on a tie
            assert float((mine != given).float().mean()) < 1e-3, name


def test_copies_and_experts_that_are_ignored(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Through the real command: one copy is written, and a layer's experts stay one tensor."""
    source, out = checkpoint(encoder_copies=True, **SMALL), tmp_path / "out"
    ignored = r"--ignore=re:.*layers\.1\.experts\..*"
    for options in ([], [ignored]):
        command_line = (*COMMAND, str(source), "--scheme", "fp8-dynamic", "--out", str(out))
        process = start_python(*command_line, *options)
        text, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, text
        written = Checkpoint(out)
        assert all(len(copies) == 1 for copies in by_one_name(written).values())
        assert (f"{LAYER}experts.gate_up_proj" in written.tensors) is bool(options)
        assert not verify(written, Checkpoint(source), lambda: None).problems
        shutil.rmtree(out)


class LargestInputs:
    """The largest inputs of every layer of a plain Hugging Face model, halves kept apart."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.found: dict[str, float] = {}
        halves = {"encoder": model.model.encoder.language_model, "decoder": model.model.decoder}
        for half, text in halves.items():
            for name, module in text.named_modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(self._linear(half, name))
                elif name.endswith(".experts"):
                    module.register_forward_pre_hook(self._experts(half, name))

    def note(self, half: str, name: str, inputs: torch.Tensor) -> None:
        key = f"{half}.{name}"
        self.found[key] = max(self.found.get(key, 0.0), float(inputs.abs().max()))

    def _linear(self, half: str, name: str) -> Callable[..., None]:
        return lambda module, inputs: self.note(half, name, inputs[0])

    def _experts(self, half: str, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            """Every expert is given every token, routed to it or not."""
            for expert in range(module.num_experts):
                gate, up = F.linear(inputs[0], module.gate_up_proj[expert]).chunk(2, dim=-1)
                self.note(half, f"{name}.{expert}.gate_proj", inputs[0])
                self.note(half, f"{name}.{expert}.up_proj", inputs[0])
                self.note(half, f"{name}.{expert}.down_proj", module.act_fn(gate) * up)

        return hook


def test_calibration_saw_what_both_halves_see_when_they_answer(
    made: Callable[[str], Path], source: Path
) -> None:
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(source, dtype=torch.float32).eval()
    largest = LargestInputs(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    for index, messages in enumerate(calibration_prompts(None, SAMPLES)):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        torch.manual_seed(SEED + index)
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=BLOCKS * model.config.canvas_length)
    written = Checkpoint(made("nvfp4"))
    decided_by = {"encoder": 0, "decoder": 0}
    for linear in small_job(source, made("nvfp4").with_name("unused")).layers:
        name = linear.module.removeprefix(DECODER)
        halves = {half: largest.found[f"{half}.{name}"] for half in decided_by}
        decided_by[max(halves, key=lambda half: halves[half])] += 1
        scale = float(written.tensors[f"{linear.module}.input_global_scale"])
        # Experts run one by one here and batched there: the sums round differently.
        assert scale == pytest.approx(448 * 6 / max(halves.values()), rel=1e-3), name
    assert min(decided_by.values()) > 0, "one half alone would have given the same scales"
