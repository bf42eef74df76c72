"""Real models convert and train: transformers built from their configurations, a ResNet, a UNet."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from models import assert_same, hook_counts
from nets import ResNet, UNet
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer, explain

STEPS = 20
LR = 1e-3
WORDS = 96
# The loss of a half run and that of an fp32 run, relative, at every one of the 20 steps. Half rounding (2^-11 and 2^-8)
# of every activation and gradient adds up over the layers and the steps; over three times the worst of three seeds
# (T5: 1.1e-3 and 1.7e-3).
DISTANCE = {torch.float16: 4e-3, torch.bfloat16: 6e-3}
# The gradients of this ViT, few tokens and a large pooler, leave fp16 at 65536: one skip, rightly. It starts lower.
LOSS_SCALE = {"vit": 2.0**12}

Batch = dict[str, Tensor]
Case = Callable[[], tuple[nn.Module, Batch]]


def ids(seed: int = 1) -> Tensor:
    return torch.randint(6, WORDS, (4, 12), generator=torch.Generator().manual_seed(seed))


def image() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def bert() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 7:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": ids(), "labels": ids(), "attention_mask": mask}


def gpt2() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_layer=2, n_embd=32, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids(), "labels": ids()}


def llama() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(), "labels": ids()}


def t5() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids()}


def vit() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": image(), "labels": ids()[:, 0] % 10}


def mixtral() -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": ids(), "labels": ids()}


def resnet() -> tuple[nn.Module, Batch]:
    return ResNet(), {"x": image(), "labels": ids()[:, 0] % 10}


def unet() -> tuple[nn.Module, Batch]:
    return UNet(), {"x": image(), "timesteps": torch.tensor([3, 2049, 511, 999]), "target": image().flip(0)}


TRANSFORMERS: dict[str, Case] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "mixtral": mixtral
}  # fmt: skip
CASES: dict[str, Case] = {**TRANSFORMERS, "resnet": resnet, "unet": unet}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and what it imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def made(name: str, device: torch.device, attention: str | None = None) -> tuple[nn.Module, Batch]:
    """Return a case from one seed, on a device."""
    torch.manual_seed(0)
    model, batch = CASES[name]()
    if attention is not None:
        model.set_attn_implementation(attention)  # type: ignore[operator]
    return model.to(device).train(), {key: value.to(device) for key, value in batch.items()}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


@functools.cache
def fp32_losses(name: str, device: torch.device) -> list[float]:
    """Return the losses of the fp32 run."""
    model, batch = made(name, device)
    optimizer = adamw(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", list(CASES))
def test_a_real_model_trains_as_in_fp32(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """20 steps without a dtype error, the loss in fp32, never far from the fp32 run; then the way back."""
    model, batch = made(name, device)
    with torch.no_grad():
        loss_of(model.eval(), batch)  # transformers registers hooks of its own in the first forward
    model.train()
    before = {key: type(module) for key, module in model.named_modules()}, hook_counts(model)
    buffers = {
        key: value.clone() for key, value in model.named_buffers() if "running" not in key and "num_b" not in key
    }
    aliases = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.named_parameters()))
    optimizer = MixedPrecisionOptimizer(adamw(model), model, dtype=dtype, loss_scale=LOSS_SCALE.get(name))
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        assert loss.dtype == torch.float32
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    reference = fp32_losses(name, device)
    worst = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    assert worst < DISTANCE[dtype]
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (STEPS, 0)
    assert losses[-1] < losses[0]
    assert losses != reference
    assert_same(buffers, {key: model.get_buffer(key).clone() for key in buffers})
    assert len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.named_parameters())) == aliases
    with torch.no_grad():
        assert loss_of(model.eval(), batch).dtype == torch.float32

    masters = {key: master.detach().clone() for key, master in optimizer.named_masters()}
    optimizer.policy_handle.remove()
    assert ({key: type(module) for key, module in model.named_modules()}, hook_counts(model)) == before
    assert_same(masters, {key: param.detach() for key, param in model.named_parameters()})


@pytest.mark.parametrize("name", list(CASES))
def test_explain_prints_a_table_for_a_real_model(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """As many parameters as there are, half as many bytes or a little more, every row within a line."""
    model, batch = made(name, device)
    told = explain(model, dtype=dtype, inputs=batch)
    assert told.parameters == sum(p.numel() for p in model.parameters()) == sum(row.parameters for row in told.rows)
    assert 2 * told.parameters <= told.bytes < 3 * told.parameters
    assert max(map(len, str(told).split("\n! ")[0].splitlines()[:-1])) <= 132
    optimizer = MixedPrecisionOptimizer(adamw(model), model, dtype=dtype)
    assert told.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert explain(model).rows == told.rows
    assert optimizer.policy_handle.active


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_a_listed_softmax_returns_fp32_and_the_rest_is_unchanged(
    name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Attention by hand with an fp32 softmax: probabilities meet half values, masks stay finite."""
    model, batch = made(name, device, "eager")
    reference = copy.deepcopy(model)
    policy = CastPolicy.default().keep_functions("softmax")
    optimizer = MixedPrecisionOptimizer(adamw(model), model, dtype=dtype, policy=policy)
    if name == "bert":
        batch["attention_mask"][2] = 0  # a row that is masked as a whole
    expected = loss_of(reference, batch)
    first = loss_of(model, batch)
    assert expected.isfinite()
    assert abs(first.item() - expected.item()) < DISTANCE[dtype] * expected.item()
    for _ in range(3):
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        assert not optimizer.last_step.skipped


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.filterwarnings("ignore:.*use_cache:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpointed_activations_change_no_bit(
    name: str, reentrant: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """A forward that runs again in backward computes what it computed."""
    policy = CastPolicy.default().keep_functions("softmax")
    weights, losses = [], []
    for checkpointed in (False, True):
        model, batch = made(name, device, "eager")
        model.config.use_cache = False  # another mask, and on a GPU other bits
        optimizer = MixedPrecisionOptimizer(adamw(model), model, dtype=dtype, policy=policy)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
            model.enable_input_require_grads()  # type: ignore[operator]
        losses.append(loss_of(model, batch).detach())
        for _ in range(2):
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
        weights.append(optimizer.master_state_dict())
    assert_same(losses[0], losses[1])
    if name != "t5":  # whose layers share a position bias: its gradient is summed in another order
        assert_same(weights[0], weights[1])


def test_a_router_can_stay_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """Mixtral's gate by its name: fp32 weights, and a model that trains."""
    model, batch = made("mixtral", device)
    optimizer = MixedPrecisionOptimizer(adamw(model), model, dtype=dtype, policy=CastPolicy.default().keep("*.gate"))
    gates = {p.dtype for key, p in model.named_parameters() if key.endswith("gate.weight")}
    assert gates == {torch.float32}
    optimizer.backward(loss_of(model, batch))
    optimizer.step()
    assert not optimizer.last_step.skipped


def test_float_timesteps_can_be_left_alone(device: torch.device, dtype: torch.dtype) -> None:
    """An argument that is named arrives as it was given; unnamed it is rounded."""
    seen = {}
    for policy in (CastPolicy.default(), CastPolicy.default().leaving("timesteps")):
        model, batch = made("unet", device)
        MixedPrecisionOptimizer(adamw(model), model, dtype=dtype, policy=policy)
        batch["timesteps"] = batch["timesteps"].float()
        loss_of(model, batch)
        assert isinstance(model, UNet)
        seen[str(policy)] = model.seen
    assert seen["default; leave=timesteps"].tolist() == [3.0, 2049.0, 511.0, 999.0]
    assert seen["default"].dtype == dtype
    assert 2049.0 not in seen["default"].tolist()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at an output's grad
@pytest.mark.parametrize("name", ["bert"])
def test_a_compiled_real_model_computes_the_same(name: str, device: torch.device) -> None:
    """``torch.compile`` traces hooks and function rules; the loss is that of the eager model."""
    model, batch = made(name, device)
    MixedPrecisionOptimizer(adamw(model), model, dtype=torch.bfloat16)
    expected = loss_of(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    found = loss_of(compiled, batch)
    assert found.dtype == torch.float32
    assert_same(expected.detach(), found.detach())
