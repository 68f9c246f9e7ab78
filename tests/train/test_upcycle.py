"""A LLaDA2 that starts as a dense model computes nearly what that model does."""

import pytest
import torch
from transformers import Glm4MoeForCausalLM

from dllm.train.lm.llada2 import LLaDA2
from dllm.train.lm.sdar import SDAR
from dllm.train.lm.settings import ModelShape, TrainSettings
from dllm.train.lm.upcycle import upcycle

SHAPE = ModelShape(hidden_size=64, num_layers=3, intermediate_size=64, moe_intermediate_size=16)


def dense_and_experts():
    """A dense model whose logits depend on positions, and a new LLaDA2 of its sizes."""
    dense = SDAR(TrainSettings("sdar", model=SHAPE)).build_model().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in dense.named_parameters():
            if "norm" in name:
                param.add_(0.3 * torch.randn(param.shape, generator=generator))
            else:
                param.copy_(torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5)
    return dense, LLaDA2(TrainSettings("llada2", model=SHAPE)).build_model().eval()


def logits(model) -> torch.Tensor:
    ids = torch.randint(10, 800, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_attention_is_nearly_that_of_the_dense_model() -> None:
    """With dense layers only the slow half of the rotation is missing: within 24 tokens little."""
    dense, experts = dense_and_experts()
    config = experts.config
    config.first_k_dense_replace = config.num_hidden_layers
    model = Glm4MoeForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    weights = upcycle(dense.state_dict(), model.state_dict(), config)
    model.load_state_dict(weights)
    expected = logits(dense)
    off = (logits(model) - expected).norm() / expected.norm()
    for name in weights:
        if "q_" in name or "k_" in name:
            weights[name] = dense.state_dict()[name]
    model.load_state_dict(weights)
    unordered = (logits(model) - expected).norm() / expected.norm()
    assert off < 0.1 < 4 * off < unordered, (off, unordered)


def test_every_neuron_is_in_an_expert() -> None:
    """The strongest are shared; with all experts at weight 1 the MLP's output comes back."""
    dense, experts = dense_and_experts()
    weights = upcycle(dense.state_dict(), experts.state_dict(), experts.config)
    experts.load_state_dict(weights)
    mlp, moe = dense.model.layers[1].mlp, experts.model.layers[1].mlp
    strength = mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    shared = moe.shared_experts.up_proj.weight
    assert torch.equal(shared, mlp.up_proj.weight[strength.topk(16).indices])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    # Four experts of 16 neurons hold the other 48, and the first 16 of these again.
    everyone = torch.arange(4).expand(5, 4)
    once = torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(5, 4)
    with torch.no_grad():
        output = moe.shared_experts(x) + moe.experts(x, everyone, once)
        torch.testing.assert_close(output, mlp(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(moe.experts.down_proj[0], moe.experts.down_proj[3])


def test_what_has_no_counterpart_stays_fresh() -> None:
    dense, experts = dense_and_experts()
    weights = upcycle(dense.state_dict(), experts.state_dict(), experts.config)
    fresh = experts.state_dict()
    assert weights.keys() == fresh.keys()
    stayed = {name for name in weights if torch.equal(weights[name], fresh[name])}
    assert stayed == {name for name in fresh if ".mlp.gate." in name}
    assert all(weights[name].shape == fresh[name].shape for name in fresh)


def test_what_does_not_fit_is_refused() -> None:
    dense, experts = dense_and_experts()
    shallow = {name: t for name, t in dense.state_dict().items() if ".layers.2." not in name}
    with pytest.raises(ValueError, match="no layer 2"):
        upcycle(shallow, experts.state_dict(), experts.config)
    experts.config.moe_intermediate_size = 64
    with pytest.raises(ValueError, match="experts of 64 neurons from an MLP of 64"):
        upcycle(dense.state_dict(), experts.state_dict(), experts.config)
