"""explain: what it says is what a conversion does, and it changes nothing."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from models import assert_same, seeded
from test_undo import structure
from torch import Tensor, nn
from torch.nn import functional as F

from mixedopt import CastPolicy, Explanation, MixedPrecisionOptimizer, convert, explain
from mixedopt.policy.dry_run import KINDS


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


class Calls(nn.Module):
    """Its code calls one function."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(16, 16), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x))


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


class Remembers(nn.Module):
    """Writes into itself in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(16, 16), 0, None
        self.register_buffer("rebound", torch.zeros(1))
        self.register_buffer("written", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last, self.rebound = self.calls + 1, x, self.rebound + 1
        self.written += torch.rand(1, device=x.device)
        self.register_buffer("late", x)
        return self.linear(x)


def test_what_a_forward_writes_into_its_module_is_undone(device: torch.device) -> None:
    """Counters, caches, buffers rebound, written or new: the same objects with the same values."""
    model = Remembers().to(device)
    rebound, written, x = model.rebound, model.written, torch.randn(2, 16, device=device)
    random = torch.get_rng_state()
    explain(model, inputs=x)
    assert (model.calls, model.last, hasattr(model, "late")) == (0, None, False)
    assert model.rebound is rebound
    assert model.written is written
    assert (rebound.item(), written.item()) == (0, 0)
    assert torch.equal(random, torch.get_rng_state())


def test_a_backward_that_waits_still_works(device: torch.device) -> None:
    """Between forward and backward: no buffer that autograd saved counts as written."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(device)
    x = torch.randn(4, 16, device=device)
    loss = model(x).square().sum()
    explain(model, inputs=x)
    loss.backward()
    assert model[0].weight.grad is not None


def hooks(model: nn.Module) -> list[Any]:
    tables = ("_forward_pre_hooks", "_forward_hooks")
    return [hook for module in model.modules() for table in tables for hook in vars(module)[table].values()]


def test_a_converted_model_learns_nothing_from_it(device: torch.device) -> None:
    """The hooks that watch its code are those of before; a forward of the user's would drop some."""
    model = nn.Sequential(Calls(lambda x: x.softmax(-1)), Calls(torch.relu)).to(device)
    handle = convert(model, policy=CastPolicy.default().keep_functions("softmax"))
    before, x = hooks(model), torch.randn(2, 16, device=device)
    explain(model, inputs=x)
    after = hooks(model)
    assert before == after
    model(x)
    assert len(hooks(model)) < len(before)
    assert handle.active


def test_an_interrupt_leaves_no_mode_in_force(device: torch.device) -> None:
    """Neither the one that records nor one of the conversion, and no hook of ours."""

    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = nn.Sequential(Calls(interrupted)).to(device)
    handle = convert(model, policy=CastPolicy.default().keep_functions("softmax"))
    before = hooks(model)
    with pytest.raises(KeyboardInterrupt):
        explain(model, inputs=torch.randn(2, 16, device=device))
    assert torch.overrides._get_current_function_mode() is None
    assert before == hooks(model)
    assert model.training
    assert handle.active


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


FUNCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "special_softmax": lambda x: torch.special.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum_": lambda x: x.cumsum_(-1),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "__rpow__": lambda x: 2.0**x,
    "mean": lambda x: x.mean(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_kind_of_function_is_named(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Methods, operators and those that write into their argument; each name in a remedy is one the policy takes."""
    model = nn.Sequential(Calls(FUNCTIONS[name])).to(device)
    policy, x = CastPolicy.none(), torch.randn(2, 16, device=device)
    (warning,) = explain(model, policy, dtype, inputs=x).warnings
    assert warning.startswith(f"{name} called in 0: ")
    if remedy := re.search(r"policy\.(keep_functions\(.*?\))(, and write)?", warning):
        mended = eval(f"policy.{remedy[1]}", {"policy": policy})
        left = explain(model, mended, dtype, inputs=x).warnings
        assert (left == ()) == (remedy[2] is None)
        assert (name == "cumsum_") == (remedy[2] is not None)
    else:
        assert "round once" in warning


def test_every_function_of_a_kind_can_be_kept() -> None:
    """No remedy names a function that a policy refuses."""
    assert set(KINDS) == set(CastPolicy.none().keep_functions(*KINDS).functions)


QUIET = {
    "its own dtype": (Calls(lambda x: x.softmax(-1, dtype=torch.float32)), CastPolicy.none()),
    "torch's module": (nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1)), CastPolicy.none()),
    "torch's block": (nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), CastPolicy.none()),
    "an island": (nn.Sequential(nn.Linear(16, 16), Calls(lambda x: x.cumsum(-1))), CastPolicy.none().keep("1")),
    "no own code": (nn.AdaptiveLogSoftmaxWithLoss(16, 32, [8]), CastPolicy.none()),
}


@pytest.mark.parametrize("name", QUIET)
def test_calls_that_need_no_function_rule_are_not_named(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Those of torch's own modules, for which there are module rules, and those that run in fp32."""
    model, policy = copy.deepcopy(QUIET[name][0]).to(device), QUIET[name][1]
    inputs: Any = (torch.randn(2, 3, 16, device=device),)
    if name == "no own code":
        inputs = (torch.randn(2, 16, device=device), torch.zeros(2, dtype=torch.long, device=device))
    assert about(explain(model, policy, dtype, inputs=inputs), "called") == []


def test_a_converted_model_shows_what_its_code_casts_up(device: torch.device, dtype: torch.dtype) -> None:
    """In fp32 a cast up cannot be seen, and the warning says so; converted, calls on half values alone count."""
    model = Calls(lambda x: x.float().pow(2).mean(-1) + x.cumsum(-1).sum(-1, dtype=torch.float32)).to(device)
    x = torch.randn(2, 16, device=device)
    told = explain(model, dtype=dtype, inputs=x)
    assert "unless the code casts up itself" in about(told, "pow called")[0]
    assert len(about(told, "called")) == 2
    handle = convert(model, dtype)
    (warning,) = explain(model, inputs=x).warnings
    assert warning.startswith("cumsum called in (model)")
    assert "unless" not in warning
    assert handle.active


def test_a_converted_loss_is_covered(device: torch.device, dtype: torch.dtype) -> None:
    """What the policy's own cross entropy calls inside is no call of the model."""
    model = seeded(Net, device)
    handle = convert(model, dtype)
    assert about(explain(model, inputs=batch(device)), "log_softmax") == []
    assert handle.active


class Recovers(nn.Module):
    """Catches what a module inside it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.norm(x[:, :3])
        except RuntimeError:
            return self.linear(x).cumsum(-1)
        return x


def test_an_error_that_the_model_catches_hides_nothing(device: torch.device) -> None:
    """Calls after it are still those of the module that makes them."""
    told = explain(Recovers().to(device), inputs=torch.randn(2, 16, device=device))
    assert len(about(told, "cumsum called in (model)")) == 1


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_and_compiled_parts_do_not_hinder_it(device: torch.device) -> None:
    """The first takes no hooks, the second runs eagerly."""
    x = torch.randn(2, 16, device=device)
    scripted = nn.Sequential(Calls(lambda x: x.cumsum(-1)), torch.jit.script(Doubles())).to(device)
    assert len(about(explain(scripted, inputs=x), "cumsum called in 0")) == 1
    compiled = nn.Sequential(Calls(lambda x: x.cumsum(-1))).to(device)

    def refuses(graph: Any, examples: Any) -> Any:
        raise RuntimeError("compiles")

    compiled[0].compile(backend=refuses)
    assert len(about(explain(compiled, inputs=x), "cumsum called in 0")) == 1


def test_sizes_that_tensor_cores_do_not_want_are_named(device: torch.device, dtype: torch.dtype) -> None:
    """A vocabulary of 50,257 with the padded sizes; a multiple of 8 is fine, and so is what stays fp32."""
    model = Net(50257).to(device)
    assert about(explain(model, dtype=dtype), "50257")[0].endswith("Pad to 50264 (or 50304).")
    assert about(explain(model, CastPolicy.fp32(), dtype), "multiple of 8") == []
    assert about(explain(Net(50264).to(device), dtype=dtype), "multiple of 8") == []


def test_small_sizes_are_not_named(device: torch.device) -> None:
    """The three channels of an image and the two labels of a classifier cannot be padded to any use."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(16, 2)).to(device)
    assert explain(model).warnings == ()


class Product(nn.Module):
    """A linear layer by hand, as that of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(20, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.table[0]


def test_weights_that_code_multiplies_are_measured_too(device: torch.device) -> None:
    """With inputs, since no type says it; a table that is only looked up is not."""
    model = Product().to(device)
    told = explain(model, inputs=torch.randn(2, 12, device=device))
    assert [told.warnings[0][:28], len(told.warnings)] == ["a dimension of 12 in weight:", 1]
    assert explain(model).warnings == ()


def test_weights_that_fp16_cannot_hold_are_named(device: torch.device) -> None:
    """Over 65504, or mostly below 2^-24; keeping them or bf16 is the remedy."""
    model = seeded(Net, device)
    with torch.no_grad():
        model.blocks[1].qkv.weight.mul_(1e-9)
        model.blocks[1].qkv.weight[0, 0] = 1.0
        model.blocks[2].qkv.bias[0] = 1e5
    told = explain(model)
    assert about(told, "blocks.1.qkv.weight") == [
        "blocks.1.qkv.weight: 767 of 768 values are below 2**-24, the least fp16 holds: "
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
    assert found[0].endswith("policy.keep('embed.weight').")
    for name in ("embed", "embed.weight"):
        assert about(explain(model, CastPolicy.default().keep(name), dtype, inputs=ids), "one id") == []


class Looks(nn.Module):
    """Looks words up, by keyword."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(input=ids)


def test_padding_and_frozen_embeddings_stall_nothing(device: torch.device) -> None:
    """They get no gradient, however often an id occurs."""
    ids = torch.full((3, 1000), 3, device=device)
    assert len(explain(Looks(), inputs=ids.cpu()).warnings) == 1
    assert explain(Looks(padding_idx=3).to(device), inputs=ids).warnings == ()
    assert explain(Looks().requires_grad_(False).to(device), inputs=ids).warnings == ()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sum_of_equal_half_gradients_stops_where_the_warning_says(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """On the CPU of this torch: one addend more changes nothing."""
    limit = 2048 if dtype == torch.float16 else 256
    layer = kind(4, 2).to(dtype)
    for count, expected in ((limit, limit), (limit + 1, limit), (2 * limit, limit)):
        layer.weight.grad = None
        out = layer(torch.zeros(count, 1, dtype=torch.long))
        out.backward(torch.ones_like(out))
        assert layer.weight.grad[0, 0] == expected


def test_the_table_folds_what_repeats(device: torch.device) -> None:
    """One line for three equal blocks, the counts added up, none for what is not there; totals below."""
    told = explain(seeded(Net, device), CastPolicy.default().keep("blocks.1.qkv"))
    lines = str(told).splitlines()
    (norms,) = [line for line in lines if "LayerNorm" in line]
    assert ["blocks.0-2.norm", "LayerNorm", "fp32", "fp32", "fp16", "<LayerNorm>=fp32", "96", "384"] == norms.split()
    assert [line.split()[0] for line in lines if "blocks" in line][1:3] == ["blocks.0,2.qkv", "blocks.1.qkv"]
    assert "<torch.nn.LayerNorm>=fp32" == next(row.rule for row in told.rows if row.type == "LayerNorm")
    assert 3 == sum(row.type == "LayerNorm" for row in told.rows)
    assert "parameters, " in lines[-1]


def test_a_line_fits_a_screen(device: torch.device) -> None:
    """Of 120 characters: names give way, in the middle; numbers do not; what stands below is wrapped."""
    name = "encoder_" * 9
    policy = CastPolicy.default().keep(f"{name}.norm", f"{name}.0*")
    parts = {"norm": nn.LayerNorm(12345), "0": nn.Linear(9, 9), "1": nn.Linear(9, 9)}
    model = nn.ModuleDict({name: nn.ModuleDict(parts)}).to(device)
    lines = str(explain(model, policy)).splitlines()
    assert max(map(len, lines)) <= 120
    assert any(re.match(r"enc\w*~\w*_\.norm .* 24,690 +98,760$", line) for line in lines)
    assert lines[-1].startswith("  ")


def test_the_rows_name_what_the_user_made(device: torch.device) -> None:
    """A class of the user's keeps its name, one of ours has torch's; a parameter of another dtype is named."""

    class MixedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.ones(1))

    model = MixedNet().to(device)
    policy = CastPolicy.default().keep("shift")
    handle = convert(model, policy=policy)
    assert type(model.norm) is not nn.LayerNorm
    root, norm = explain(model).rows
    assert (root.type, root.param_dtype, norm.type) == ("MixedNet", "mixed", "LayerNorm")
    assert (root.parameters, root.bytes) == (2, 6)
    assert handle.active


def test_a_model_without_storage_can_be_explained() -> None:
    """On the meta device: its size is known, its values are not."""
    with torch.device("meta"):
        model = Net()
    assert explain(model).bytes == explain(Net()).bytes
    assert explain(model).warnings == ()


def test_a_module_added_since_the_conversion_is_named(device: torch.device) -> None:
    """It shows what it is, and that no cast stands before it."""
    model = seeded(Net, device)
    handle = convert(model)
    model.adapters = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]).to(device)
    told = explain(model)
    row = told.rows[-1]
    assert (row.module, row.param_dtype, row.compute_dtype) == ("adapters.1", torch.float32, torch.float32)
    assert row.rule == "added since the conversion"
    assert told.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(about(told, "adapters.0-1: added since the conversion")) == 1
    model.adapters, model.stats = None, nn.Identity()  # one without weights needs no cast
    assert about(explain(model), "added") == []
    handle.remove()
    assert about(explain(model), "added") == []


def test_bert_base_fits_a_screen() -> None:
    """In its full size: 12 blocks in a screen of 25 lines of 120 characters, no two lines with one name."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig())
    lines = str(explain(model)).splitlines()
    names = [line.split()[0] for line in lines[2 : lines.index("")]]
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 25
    assert sorted(set(names)) == sorted(names)
    assert "bert~r.layer.0-11.attention.self.query" in names


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers_fit_a_screen(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Equal blocks on one line each, all names apart; Conv1D measured; each weight once; nothing changes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 2, "hidden_size": 12, "vocab_size": 50}
    if name == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=24)
        model = transformers.BertForMaskedLM(config)
        kept, block = "bert.encoder", "layer.0-11.output.dense"
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        kept, block = "transformer.h", "transformer.h.0-11.attn.c_attn"
    model = model.to(device)
    ids = torch.arange(2 * 9, device=device).view(2, 9)
    before = structure(model), copy.deepcopy(model.state_dict())
    told = explain(model, dtype=dtype, inputs={"input_ids": ids, "labels": ids})
    text = str(told).split("\n\n")[0].splitlines()
    names = [line.split()[0] for line in text[2:]]
    assert (structure(model), True) == (before[0], len(text) <= 25)
    assert_same(dict(before[1]), {key: value.clone() for key, value in model.state_dict().items()})
    assert max(map(len, str(told).splitlines())) <= 120
    assert sorted(set(names)) == sorted(names)
    assert any(each.endswith(block) for each in names)
    assert len(about(told, "scaled_dot_product_attention called in")) == 1
    assert len(about(told, "a dimension of 50 in")) == 1
    assert (name == "gpt2") == bool(about(told, "a dimension of 36 in transformer.h.0-11.attn.c_attn.weight"))
    assert told.parameters == sum(p.numel() for p in model.parameters())
    assert {row.rule for row in explain(model, CastPolicy.default().keep(kept)).rows} >= {f"{kept}=fp32"}
    handle = convert(model, dtype)
    assert told.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert explain(model).rows == told.rows
    handle.remove()


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
