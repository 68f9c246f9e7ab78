"""A model that is not ours behaves with the plugin as without it, and can opt into our CPU runtime.

So do config.json files and tokenizers of any model, and other plugins of vLLM work beside ours.

So it does where the plugin does not fit: with another version of vLLM, and beside a package that is
called ``dllm``, too. There a server that asks for something of ours is refused.

Each configuration runs in a process of its own, which is this file as a script: what the plugin
patches cannot be taken back.
"""

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafter_pairs import TOKENIZER, write_target
from tests.support.process import QUIET_ENGINE, printed_json, python_path, run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPECULATOR = "dllm.remote.speculator.RemoteDrafts"
CPU_WORKER = "dllm.patches.cpu_worker.CanvasCPUWorker"

CONTEXTS = [
    [20 + (7 * i + salt) % 450 for i in range(length)] for salt, length in enumerate((3, 40, 90))
]
# Parameters whose outcome leaves no room for chance; the second column shows that they did
# something: their tokens are not the plain ones.
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 1.0, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "presence and frequency": GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": GREEDY | {"repetition_penalty": 1.8},
    "logit bias": GREEDY | {"logit_bias": {100: 100.0}},
    "allowed ids": GREEDY | {"allowed_token_ids": [30, 40, 50]},
    "logprobs": GREEDY | {"logprobs": 3, "prompt_logprobs": 2},
    "one candidate": SAMPLED | {"top_k": 1},
    "tiny nucleus": SAMPLED | {"top_p": 1e-6},
    "certain": SAMPLED | {"min_p": 1.0},
}
PLAIN = ("greedy", "logprobs", "one candidate", "tiny nucleus", "certain")
GREEDY_ONLY = {"greedy": GREEDY}
# Of the package that is installed beside the CPU runtime; vLLM's own runner there has no such one.
PROCESSED = {"processor": GREEDY | {"extra_args": {"theirs_only": 77}}}
# Drawn at random: each engine has its own noise, but a seed fixes it.
DRAWN = {"seed 5": SAMPLED, "seed 5 again": SAMPLED, "seed 6": SAMPLED | {"seed": 6}}


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, in fp32, with our tokenizer."""
    return write_target(tmp_path_factory.mktemp("qwen3"), layers=2)


# What is installed beside us, as pip writes it: by setup, by file, a text.
INSTALLED = {
    "another version": {
        "vllm-9.8.7+cpu.dist-info/METADATA": "Name: vllm\nVersion: 9.8.7+cpu\n",
    },
    "a namesake": {
        "theirs-1.0.dist-info/METADATA": "Name: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\ndllm = theirs:register",
        "theirs.py": "def register(): pass",
    },
}
A_PROCESSOR = {
    "theirs-1.0.dist-info/METADATA": "Name: theirs\nVersion: 1.0\n",
    "theirs-1.0.dist-info/entry_points.txt": "[vllm.logits_processors]\nonly = theirs:OnlyToken",
    "theirs.py": """
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

class OnlyToken(LogitsProcessor):
    def __init__(self, vllm_config, req_states):
        self.only = [None] * req_states.max_num_reqs

    def add_request(self, slot, params):
        self.only[slot] = (params.extra_args or {}).get("theirs_only")
        return self.only[slot] is not None

    def apply(self, logits, context):
        for row, slot in enumerate(context.expanded_idx_mapping.tolist()):
            if self.only[slot] is not None:
                logits[row] = -float("inf")
                logits[row, self.only[slot]] = 0.0
        return logits
""",
}
REFUSED = {
    "another version": "dllm was tested with vLLM 0.32, 0.33 and this is 9.8.7+cpu.",
    "a namesake": "theirs also installs a plugin or a package called 'dllm'",
}


# The keys of `dllm.models.REFUSED`, which this module does not import: it runs without the plugin.
NOT_SERVED = ("Dream", "llada")
# Models with remote code, by model_type: their architecture. vLLM has a class for the last one, and
# we have one for "sdar", which is not loaded here.
REMOTE_CODE = {
    **{name: f"{name}OtherModel" for name in NOT_SERVED},
    "martian": "MartianForCausalLM",
    "sdar": "SDARForCausalLM",
    "earthling": "Qwen3ForCausalLM",
}
CONFIGURATION = """
from transformers import Qwen3Config
class RemoteConfig(Qwen3Config):
    model_type = "{}"
    def __init__(self, remote_field=1, **fields):
        self.remote_field = remote_field
        super().__init__(**fields)
"""


@pytest.fixture(scope="session")
def remote_code(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with config.json, remote code to read it, and a tokenizer; called as model_type."""
    folder = tmp_path_factory.mktemp("remote_code")
    fields = json.loads((qwen3 / "config.json").read_text())
    for model_type, architecture in REMOTE_CODE.items():
        path = folder / model_type
        path.mkdir()
        own = {"model_type": model_type, "architectures": [architecture], "remote_field": 7}
        own["auto_map"] = {"AutoConfig": "configuration_remote.RemoteConfig"}
        (path / "config.json").write_text(json.dumps(fields | own))
        (path / "configuration_remote.py").write_text(CONFIGURATION.format(model_type))
        shutil.copy(TOKENIZER / "tokenizer.json", path)
        (path / "tokenizer_config.json").write_text("{}")  # so the class depends on config.json
    return folder


def install(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def outcome(
    qwen3: Path,
    remote_code: Path,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, Any]]:
    """What Qwen3 answers in a process that is set up in one of the four ways."""
    from tests.support import family_checkpoints  # not in the process, where it would load ours

    @functools.cache
    def run(setup: str) -> dict[str, Any]:
        beside = tmp_path_factory.mktemp("beside")
        install(INSTALLED.get(setup, {}), beside)
        install(A_PROCESSOR, beside / "later")
        environment = QUIET_ENGINE | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_PLUGINS": "" if setup == "no plugin" else None,
            "PYTHONPATH": python_path(ROOT, beside),
            "HF_MODULES_CACHE": str(beside / "modules"),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        masked = family_checkpoints.write(beside / "masked", family_checkpoints.SDAR)
        models = qwen3, checkpoint(), masked, remote_code
        arguments = (setup, *map(str, models), str(beside / "later"))
        finished = run_python("-m", __name__, *arguments, environment=environment)
        return printed_json(finished) | {"log": finished.stdout}

    return run


def test_without_the_plugin_nothing_of_ours_is_loaded(outcome):
    assert outcome("no plugin")["loaded"] == []
    assert "dllm.patches.install" in outcome("beside ours")["loaded"]


def test_a_model_served_beside_ours_behaves_as_without_the_plugin(outcome):
    """Same process: ours has answered a request before, and its patches are all in place."""
    beside, alone = outcome("beside ours"), outcome("no plugin")
    assert beside["runner"] == alone["runner"]
    assert beside["scheduler"] == alone["scheduler"]
    assert beside["tokens"] == alone["tokens"]
    assert beside["logprobs"] == alone["logprobs"]


@pytest.mark.parametrize("setup", ["beside ours", *INSTALLED])
@pytest.mark.parametrize("model_type", REMOTE_CODE)
def test_whoever_reads_a_config_or_a_tokenizer_gets_what_he_gets_without_us(
    outcome, setup, model_type
):
    there, alone = (outcome(each)["read"][model_type] for each in (setup, "no plugin"))
    assert there == alone
    assert "RemoteConfig" in alone["config"] and '"remote_field": 7' in alone["config"]
    assert "contains custom code" in alone["config, not trusted"]


@pytest.mark.parametrize("model_type", [name for name in REMOTE_CODE if name != "sdar"])
def test_a_server_of_another_model_starts_or_not_as_without_us(outcome, model_type):
    """Diffusion models that we know are refused with our reason instead of vLLM's."""
    from dllm.models import REFUSED as reasons

    assert list(reasons) == list(NOT_SERVED)
    there, alone = (outcome(each)["servers"][model_type] for each in ("beside ours", "no plugin"))
    if model_type in NOT_SERVED:
        assert "are not supported for now" in alone
        assert f"{model_type!r} is not served: {reasons[model_type]}" in there
    else:
        listed = "Supported architectures"  # ours among them
        assert there.partition(listed)[0] == alone.partition(listed)[0]
        assert alone.startswith("model=" if model_type == "earthling" else "ValidationError")


def test_the_cases_are_what_they_say(outcome):
    """Otherwise the comparisons above and below would be of nine greedy runs."""
    tokens = outcome("no plugin")["tokens"]
    greedy = tokens["greedy"]
    assert {name for name in CASES if tokens[name] == greedy} == set(PLAIN)
    assert len({tuple(row) for row in greedy}) == len(CONTEXTS)
    assert all(len(set(row)) > 2 for row in greedy)


@pytest.mark.parametrize("setup", INSTALLED)
def test_where_the_plugin_does_not_fit_other_models_are_left_alone(outcome, setup):
    there, alone = outcome(setup), outcome("no plugin")
    assert there["config"] == alone["config"]
    if setup == "another version":
        assert there["runner"] == alone["runner"]
        assert there["tokens"] == {"greedy": alone["tokens"]["greedy"]}
    patching = [name for name in there["loaded"] if name.startswith("dllm.patches.")]
    assert patching == ["dllm.patches.neighbours", "dllm.patches.replace"]


@pytest.mark.parametrize("setup", INSTALLED)
@pytest.mark.parametrize("asked", ["diffusion", "masked", "drafter", "remote", "option", "worker"])
def test_where_the_plugin_does_not_fit_ours_is_refused(outcome, setup, asked):
    (line,) = outcome(setup)["refused"][asked].splitlines()
    assert line.startswith(REFUSED[setup])


@pytest.mark.parametrize("case", CASES)
def test_the_cpu_runtime_gives_the_tokens_of_vllms_own_runner(outcome, case):
    """Model Runner V2 without Triton, opted into with `worker_cls`."""
    ours, vllms = outcome("beside ours")["cpu runtime"], outcome("no plugin")
    assert ours["runner"] != vllms["runner"]
    assert ours["tokens"][case] == vllms["tokens"][case]


def test_the_cpu_runtime_gives_the_logprobs_of_vllms_own_runner(outcome):
    ours = outcome("beside ours")["cpu runtime"]["logprobs"]
    vllms = outcome("no plugin")["logprobs"]
    for kind in ("prompt", "output"):
        assert [[sorted(place) for place in row] for row in ours[kind]] == [
            [sorted(place) for place in row] for row in vllms[kind]
        ]
        for our_row, their_row in zip(ours[kind], vllms[kind], strict=True):
            for our_place, their_place in zip(our_row, their_row, strict=True):
                assert our_place == pytest.approx(their_place, abs=1e-4)


def test_the_cpu_runtime_samples_by_seed(outcome):
    tokens = outcome("beside ours")["cpu runtime"]["tokens"]
    assert tokens["seed 5"] == tokens["seed 5 again"]
    assert tokens["seed 5"] != tokens["seed 6"]
    assert tokens["seed 5"] != tokens["greedy"]


def test_a_package_with_a_logits_processor_works_beside_ours(outcome):
    """An autoregressive model has it applied; a canvas has not, and the log says so once."""
    result = outcome("beside ours")
    tokens = result["cpu runtime"]["tokens"]["processor"]
    assert tokens == [[77] * GREEDY["max_tokens"]] * len(CONTEXTS)
    assert result["canvas"] == 4
    assert result["log"].count("the logits processor theirs:OnlyToken is not applied") == 1


# --- the process ---------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}


def main(
    setup: str, qwen3: str, diffusion: str, masked: str, remote_code: str, processor: str
) -> None:
    """Print, as JSON, what Qwen3 answers in this process."""
    from vllm import LLM, EngineArgs, SamplingParams

    first = EngineArgs(qwen3, **OPTIONS).create_engine_config()
    cases, canvas = CASES | DRAWN, []
    if setup == "beside ours":
        sys.path.append(processor)  # it is installed, as far as ours can see
        ours = LLM(diffusion, **OPTIONS)
        answer = ours.generate(
            {"prompt_token_ids": CONTEXTS[0]},
            SamplingParams(max_tokens=4, ignore_eos=True),
            use_tqdm=False,
        )
        canvas = answer[0].outputs[0].token_ids
        sys.path.remove(processor)
    result = {
        "canvas": len(canvas),
        "config": [str(first), repr(first.scheduler_config)],
        "refused": refusals(qwen3, diffusion, masked) if setup in INSTALLED else {},
    }
    if setup != "a namesake":
        plain = LLM(qwen3, **OPTIONS)  # kept: its end would be that of the others
        result |= answers(plain, GREEDY_ONLY if setup in INSTALLED else cases)
    if setup == "beside ours":
        sys.path.append(processor)
        opted = LLM(qwen3, **OPTIONS, worker_cls=CPU_WORKER)
        result["cpu runtime"] = answers(opted, cases | PROCESSED)
    result["read"] = {name: read(f"{remote_code}/{name}") for name in REMOTE_CODE}
    if setup in ("no plugin", "beside ours"):
        result["servers"] = {
            name: outcome_of(lambda name=name: configured(f"{remote_code}/{name}"))
            for name in REMOTE_CODE
        }
    result["loaded"] = sorted(name for name in sys.modules if name.startswith("dllm"))
    print(json.dumps(result))


def read(path: str) -> dict[str, str]:
    """What transformers makes of a folder."""
    from transformers import AutoConfig, AutoTokenizer

    def config(trusts: bool) -> str:
        found = AutoConfig.from_pretrained(path, trust_remote_code=trusts)
        return f"{type(found).__name__}: {found.to_json_string()}"

    def tokenizer() -> str:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        return f"{type(found).__name__}: {found.encode('Sort these')}"

    return {
        "config": outcome_of(lambda: config(True)),
        "config, not trusted": outcome_of(lambda: config(False)),
        "tokenizer": outcome_of(tokenizer),
    }


def configured(path: str) -> str:
    """The configuration of a server of a folder."""
    from vllm import EngineArgs

    return str(EngineArgs(path, trust_remote_code=True, **OPTIONS).create_engine_config())


def outcome_of(call: Callable[[], str]) -> str:
    """What it returns, or the error that it raises, without addresses in memory."""
    try:
        return call()
    except Exception as error:
        return re.sub("0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")


def answers(llm: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens of these cases, the log probabilities of one, and what served them."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    prompts = [{"prompt_token_ids": context} for context in CONTEXTS]
    tokens, logprobs = {}, {}
    for name, case in cases.items():
        outputs = llm.generate(prompts, SamplingParams(**case), use_tqdm=False)
        tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
        if name == "logprobs":
            logprobs["prompt"] = [readable(output.prompt_logprobs[1:]) for output in outputs]
            logprobs["output"] = [readable(output.outputs[0].logprobs) for output in outputs]
    return {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "scheduler": type(core.scheduler).__qualname__,
        "tokens": tokens,
        "logprobs": logprobs,
    }


def refusals(qwen3: str, diffusion: str, masked: str) -> dict[str, str]:
    """What servers of something of ours are told; empty if one would start."""
    from vllm import EngineArgs

    target, drafter = (str(ROOT / "checkpoints" / name) for name in ("tiny-ar", "tiny-drafter"))
    remote = {"method": "custom_class", "model": SPECULATOR, "num_speculative_tokens": 3}
    dflash = {"method": "dflash", "model": drafter, "num_speculative_tokens": 3}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "diffusion": (diffusion, {}),
        "masked": (masked, {}),
        "drafter": (target, {"speculative_config": dflash}),
        "remote": (qwen3, {"speculative_config": remote}),
        "option": (qwen3, {"additional_config": {"dllm": {}}}),
        "worker": (qwen3, {"worker_cls": CPU_WORKER}),
    }
    refused = {}
    for name, (model, flags) in asked.items():
        refused[name] = ""
        try:
            EngineArgs(model, **OPTIONS | flags).create_engine_config()
        except ValueError as error:
            refused[name] = str(error)
    return refused


def readable(logprobs: Any) -> list[dict[str, float]]:
    return [{str(token): entry.logprob for token, entry in place.items()} for place in logprobs]


if __name__ == "__main__":
    main(*sys.argv[1:])
