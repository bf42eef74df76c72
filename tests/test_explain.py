"""explain: what it says is what a conversion does, and it changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same, seeded
from test_undo import structure
from torch import Tensor, nn
from torch.nn import functional as F

from mixedopt import CastPolicy, Explanation, MixedPrecisionOptimizer, convert, explain


class Block(nn.Module):
    """Attention by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.drop = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Net(nn.Module):
    """A language model with a tied head, that computes its loss."""

    def __init__(self, words: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.stats = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.stats(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(x.cumsum(1))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(device: torch.device, words: int = 64) -> dict[str, Tensor]:
    ids = torch.arange(2 * 9, device=device).view(2, 9) % words
    return {"ids": ids, "labels": ids}


@pytest.mark.parametrize("policy", [None, CastPolicy.none(), CastPolicy.fp32(), CastPolicy.default().keep("head")])
def test_what_it_says_is_what_a_conversion_does(
    policy: CastPolicy | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Dtypes and bytes of every module, totals, each tied parameter once; the same rows for a converted model."""
    model = seeded(Net, device)
    told = explain(model, policy, dtype)
    assert isinstance(told, Explanation)
    handle = convert(model, dtype, policy)
    for row in told.rows:
        own = {p.dtype for p in model.get_submodule(row.module).parameters(recurse=False)}
        assert own == (set() if row.param_dtype is None else {row.param_dtype})
    assert told.parameters == sum(p.numel() for p in model.parameters()) == sum(row.parameters for row in told.rows)
    assert told.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert told.fp32_bytes == 4 * told.parameters
    assert told.policy == str(policy or CastPolicy.default())
    assert explain(model).rows == told.rows
    assert handle.active
    out = model(**batch(device))
    assert out.dtype == told.rows[0].output_dtype == torch.float32


def test_it_changes_nothing(device: torch.device) -> None:
    """No weight, buffer, flag, hook, class or random number, with a dry run, also one that fails."""
    model = seeded(Net, device).train()
    model.blocks[1].eval()
    wrong = torch.randn(2, 3, device=device)
    before = structure(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    explain(model, inputs=batch(device))
    with pytest.raises(ValueError, match=r"explain\(inputs=\.\.\.\): the model raised"):
        explain(model, inputs=wrong)
    assert structure(model) == before[0]
    assert_same(dict(before[1]), {name: value.clone() for name, value in model.state_dict().items()})
    assert torch.equal(before[2], torch.get_rng_state())


def about(told: Explanation, word: str) -> list[str]:
    return [warning for warning in told.warnings if word in warning]


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_functions_that_no_module_rule_reaches_are_named(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """With the modules that call them and the remedy, which takes the line away; losses are covered by default."""
    model = seeded(Net, device)
    inputs: Any = batch(device) if form == "dict" else tuple(batch(device).values())
    told = explain(model, dtype=dtype, inputs=inputs)
    assert about(told, "softmax")[0].startswith("softmax called in blocks.0-2: no module rule reaches that.")
    assert "round once" in about(told, "softmax")[0]
    assert "policy.keep_functions('cumsum')" in about(told, "cumsum called in (model)")[0]
    assert about(told, "cross_entropy") == about(told, "layer_norm") == about(told, "batch_norm") == []
    assert len(about(explain(model, CastPolicy.none(), dtype, inputs=inputs), "cross_entropy")) == 1
    mended = CastPolicy.default().keep_functions("cumsum", "softmax")
    assert about(explain(model, mended, dtype, inputs=inputs), "called") == []
    assert about(explain(model, dtype=dtype), "called") == []


def test_sizes_that_tensor_cores_do_not_want_are_named(device: torch.device, dtype: torch.dtype) -> None:
    """A vocabulary of 50,257 with the padded sizes; a multiple of 8 is fine, and so is what stays fp32."""
    model = Net(50257).to(device)
    assert about(explain(model, dtype=dtype), "50257")[0].endswith("Pad to 50264 (or 50304).")
    assert about(explain(model, CastPolicy.fp32(), dtype), "multiple of 8") == []
    assert about(explain(Net(50264).to(device), dtype=dtype), "multiple of 8") == []


def test_weights_that_fp16_cannot_hold_are_named(device: torch.device) -> None:
    """Over 65504, or mostly below 2^-24; keeping them or bf16 is the remedy."""
    model = seeded(Net, device)
    with torch.no_grad():
        model.blocks[1].qkv.weight.mul_(1e-9)
        model.blocks[1].qkv.weight[0, 0] = 1.0
        model.blocks[2].qkv.bias[0] = 1e5
    told = explain(model)
    assert about(told, "blocks.1.qkv.weight") == [
        "blocks.1.qkv.weight: 767 of 768 values are below 2**-24 and vanish in fp16: "
        "policy.keep('blocks.1.qkv.weight') or dtype=torch.bfloat16."
    ]
    assert "holds 1e+05, which torch.float16 cannot" in about(told, "blocks.2.qkv.bias")[0]
    assert len(told.warnings) == 2
    assert explain(model, dtype=torch.bfloat16).warnings == ()
    assert explain(model, CastPolicy.default().keep("blocks.[12].qkv")).warnings == ()


def test_an_id_that_repeats_too_often_is_named(device: torch.device, dtype: torch.dtype) -> None:
    """More often than a half sum of equal gradients can count."""
    model = seeded(lambda: Net(words=64), device)
    limit = 2048 if dtype == torch.float16 else 256
    for count, lines in ((limit, 0), (limit + 1, 1)):
        ids = torch.cat([torch.zeros(count, dtype=torch.long), torch.arange(1, 8)])[None].to(device)
        found = about(explain(model, dtype=dtype, inputs=ids), "one id occurs")
        assert len(found) == lines
    assert f"{limit + 1:,} times" in found[0]
    assert about(explain(model, CastPolicy.default().keep("embed"), dtype, inputs=ids), "one id") == []


def test_the_table_folds_what_repeats(device: torch.device) -> None:
    """One line for three equal blocks, the counts added up; lines of a screen's width; totals below."""
    text = str(explain(seeded(Net, device), CastPolicy.default().keep("blocks.1.qkv")))
    lines = text.splitlines()
    assert len([line for line in lines if "LayerNorm" in line]) == 1
    assert "blocks.0-2.norm (3x)" in text
    assert "blocks.1.qkv=fp32" in text
    assert "<torch.nn.LayerNorm>=fp32" in text
    assert "parameters, " in lines[-1]
    assert max(map(len, lines)) <= 132


def test_it_shows_the_conversion_in_force(device: torch.device, dtype: torch.dtype) -> None:
    """Of an optimizer or a handle; another policy is refused, and so is a model whose handle is gone."""
    model = seeded(Net, device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=CastPolicy.default().keep("head"))
    assert explain(model).policy == "head=fp32; default"
    assert explain(model).dtype == dtype
    with pytest.raises(ValueError, match="converted already, by 'head=fp32; default'"):
        explain(model, CastPolicy.none())
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="what converted it, an optimizer or a handle, is gone"):
        explain(twin)
    optimizer.policy_handle.remove()
    assert explain(model).policy == "default"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("model",), "must be an nn.Module"), ((nn.Linear(1, 1), "fp16"), "must be a CastPolicy"),
     ((nn.Linear(1, 1), None, torch.float32), "must be torch.float16 or")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments: Any, words: str) -> None:
    """As ``convert`` names them."""
    with pytest.raises((TypeError, ValueError), match=words):
        explain(*arguments)
    with pytest.raises(TypeError, match="must be a tensor, a tuple of arguments, or a dict"):
        explain(nn.Linear(1, 1), inputs=3)  # type: ignore[arg-type]
