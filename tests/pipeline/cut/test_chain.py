"""Models cut into layers: the parts together are the model, bit by bit, and what is no chain is refused."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine.models import Plain, batch, build
from pipeline.chains import (
    Frame,
    Outcome,
    Run,
    call,
    classify,
    gradients,
    in_parts,
    on_stages,
    patches,
    pictures,
    vgg,
    whole,
)
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError, PlanError
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.stage import refuse_last_hook
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig
from zeroshard.units.forwards import insert

SMALL = GPTConfig(vocabulary=19, context=12, width=8, heads=2, layers=3, dropout=0.1)


def equal(one: Outcome, other: Outcome) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert [name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])] == []


def cuts(layers: int) -> Iterator[list[int]]:
    """Every boundary alone, and all at once."""
    yield from ([0, first] for first in range(1, layers))
    yield list(range(layers))


def check_all_cuts(model: nn.Module, examples: tuple[Any, Any], run: Run = call) -> Chain:
    """The parts of a model, in one process and on stages apart, against the whole; on a batch unlike the example."""
    example, other = examples
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: run(cut, example))
    expected = whole(model, other, run)
    for firsts in cuts(len(chain.layers)):
        equal(in_parts(chain, other, cut, firsts, run), expected)
        equal(on_stages(model, example, other, firsts, run), expected)
    cut.zero_grad()
    torch.manual_seed(7)
    loss = run(cut, other)  # outside of `chain.run`, nothing is cut
    loss.backward()
    equal((loss.detach(), gradients(cut)), expected)
    return chain


def tokens(rows: int) -> tuple[Tensor, int]:
    return batch(rows, 0, 1, rows), 0


KINDS = ["Plain", "Tied", "Frozen", "Nested", "TwoDtypes"]


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_small_models(name: str) -> None:
    chain = check_all_cuts(build(name), (tokens(2), tokens(3)))
    inner = "stages.0." if name == "Nested" else "blocks."
    assert [layer.name for layer in chain.layers][:3] == ["prefix", f"{inner}0", f"{inner}1"]
    assert chain.layers[-1].name == "suffix"


def test_gradients_of_both_uses_of_a_tied_weight() -> None:
    model = build("Tied")
    chain = Chain(model, lambda: model(*tokens(2)))
    assert list(chain.layers[0].parameters) == list(chain.layers[-1].parameters) == ["embed.weight"]
    _, both = in_parts(chain, tokens(3), model, [0, 2])
    sites = [(chain.path(module), name) for module, name in chain.sites(model.embed.weight)]  # type: ignore[union-attr]
    assert sites == [("embed", "weight"), ("head", "weight")]
    model.zero_grad()
    hidden = chain.run(0, 2, lambda: model(*tokens(3))).detach().requires_grad_()
    chain.run(2, 5, lambda: model(*tokens(3)), hidden).backward()
    of_head = gradients(model)["embed.weight"].clone()
    model.zero_grad()
    chain.run(0, 2, lambda: model(*tokens(3))).backward(hidden.grad)
    torch.testing.assert_close(of_head + gradients(model)["embed.weight"], both["embed.weight"])
    assert of_head.abs().max() > 0 and gradients(model)["embed.weight"].abs().max() > 0


class Half(nn.Module):
    """What a technique makes of a linear layer: another matrix, and a forward that widens again."""

    @staticmethod
    def of(layer: nn.Linear) -> nn.Parameter:
        layer._parameters["weight"] = part = nn.Parameter(layer.weight.detach()[: layer.out_features // 2].clone())
        insert(layer, "divided", lambda plain: lambda x: plain(x).repeat(1, 1, 2))
        return part


def test_parameters_and_forwards_that_are_replaced_after_the_cut() -> None:
    """Forwards come under the gates, which look for the shapes anew; layers have the new parameters, of old names."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    x = torch.randn(2, 3, 6)
    chain = Chain(model, lambda: model(x).sum())
    plain = [layer.forward for layer in model]
    before = [layer.weight for layer in model]
    new = {old: Half.of(layer) for old, layer in zip(before[1:], list(model)[1:], strict=True)}  # type: ignore[arg-type]
    chain.replace(new)
    assert [layer.forward for layer in model] == plain  # the gates
    found = [parameter for layer in chain.layers for parameter in layer.parameters.values()]
    assert [id(p) for p in found] == [id(layer.weight) for layer in model] and found[0] is before[0]
    expected = model(x)
    hidden = chain.run(0, 3, lambda: model(x))
    assert torch.equal(chain.run(3, 6, lambda: model(x), hidden), expected)
    assert chain.boundary(3, lambda: model(x)).shape == (2, 3, 6)


def test_hooks_around_a_cut_see_what_they_see_in_the_whole() -> None:
    """Forwards and gradients of what enters and leaves a block, wherever it is cut."""
    model = build("Plain")
    for block in model.blocks[:-1]:
        block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 0.7 + outputs[0] * 0.1,))
        block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 1.3,))
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
        block.register_forward_hook(lambda module, args, output: output * 0.9)
    chain = check_all_cuts(model, (tokens(2), tokens(3)))
    chain.model.blocks[-1].register_full_backward_hook(lambda module, grads, outputs: None)
    with pytest.raises(ModelError, match=r"has a full backward hook, and the next stage has only what comes after"):
        refuse_last_hook(chain.layers, [0, len(chain.layers) - 1])
    refuse_last_hook(chain.layers, [0, len(chain.layers) - 2])


class Batched(Plain):
    """The code around the blocks maps one over the rows."""

    def body(self, x: Tensor, step: int) -> Tensor:
        mapped: Tensor = torch.vmap(self.blocks[1])(self.blocks[0](x))
        return self.blocks[2](mapped)


def test_blocks_inside_of_a_transform_are_refused() -> None:
    model = Batched()
    with pytest.raises(ModelError, match=r"'blocks\.1' runs inside of torch\.vmap, torch\.func\.jvp or another"):
        Chain(model, lambda: model(*tokens(2)))


def test_hooks_of_a_block_that_is_passed_over_run_once() -> None:
    """They stand around the gate, so what enters the next block is as wide as in the whole model."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    x = torch.randn(2, 8, 6)
    chain = Chain(model, lambda: model(x).sum())
    model[1].register_forward_pre_hook(lambda module, args: args[0][:, ::2])
    model[2].register_forward_hook(lambda module, args, output: output[:, ::2])
    for layer, rows in ((1, 8), (2, 4), (3, 4), (4, 2)):
        assert chain.boundary(layer, lambda: model(x)).shape == (2, rows, 6)
    hidden = chain.run(0, 3, lambda: model(x))
    assert torch.equal(chain.run(3, 6, lambda: model(x), hidden), model(x))


def language(rows: int, length: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(19, (rows, length)), torch.randint(19, (rows, length))


def test_parts_of_the_built_in_model_with_dropout() -> None:
    chain = check_all_cuts(GPT(SMALL), (language(2), language(3, 5)))
    names = ["prefix", "blocks.0", "blocks.1", "blocks.2", "suffix"]
    assert [layer.name for layer in chain.layers] == names
    assert [chain.number(name) for name in names] == [0, 1, 2, 3, 4]
    assert chain.blocks == 3
    assert [chain.path(module) for module in chain.layers[0].modules] == ["embedding", "dropout"]
    assert [chain.path(module) for module in chain.layers[-1].modules] == ["norm", "head"]
    assert list(chain.layers[-1].parameters) == ["norm.weight", "embedding.weight"]
    with pytest.raises(ModelError, match=r"no layer 'blocks.3' to cut before; its layers are prefix, blocks.0, .*fix"):
        chain.number("blocks.3")


def test_the_built_in_model_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    example = torch.zeros(2, 8, dtype=torch.long, device="meta")
    chain = Chain(model, lambda: model(example, example))
    assert chain.blocks == 3
    assert len(chain.layers[1].parameters) == 6
    assert all(module in chain.modules for layer in chain.layers for module in layer.modules)
    more = torch.zeros(3, 5, dtype=torch.long)
    for device in ("meta", "cpu"):
        entering = chain.boundary(3, lambda device=device: model(more.to(device), None))  # type: ignore[misc]
        assert (entering.shape, entering.dtype, entering.device.type) == ((3, 5, 8), torch.float32, device)
    assert entering.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("flat", [True, False])
def test_parts_of_layers_whose_widths_change(flat: bool) -> None:
    chain = check_all_cuts(vgg(flat), (pictures(2), pictures(3)), classify)
    if flat:
        assert [layer.name for layer in chain.layers] == ["prefix", *map(str, range(12)), "suffix"]
        return
    names = ["prefix", "features.0", "features.3", "classifier.0", "classifier.3", "suffix"]
    assert [layer.name for layer in chain.layers] == names
    assert [chain.path(module) for module in chain.layers[2].modules] == [f"features.{n}" for n in (3, 4, 5, 6)]


def test_parts_of_a_frame_with_parameters_tables_tuples_and_layers_in_between() -> None:
    chain = check_all_cuts(Frame(), (patches(2), patches(3, 3)))
    assert set(chain.layers[0].parameters) == {"patch.weight", "patch.bias", "cls", "position"}
    between = {"between.0.0.weight", "between.0.0.bias", "gain"}
    assert between < set(chain.layers[2].parameters) and not between & set(chain.layers[1].parameters)
    assert [chain.path(module) for module in chain.layers[2].modules] == ["blocks.1", "between.0.0", "between.0.1"]


def test_a_frame_parameter_that_nothing_uses_is_in_the_prefix() -> None:
    model = Frame()
    model.spare = nn.Parameter(torch.zeros(2))
    chain = Chain(model, lambda: model(*patches(2)))
    assert "spare" in chain.layers[0].parameters


class WritesInto(Plain):
    """A frame that writes into what its modules returned."""

    def body(self, x: Tensor, step: int) -> Tensor:
        x += 1
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return x


def test_parts_of_a_frame_that_writes_into_what_modules_returned() -> None:
    check_all_cuts(WritesInto(), (tokens(2), tokens(3)))


class Added(nn.Module):
    """The batch goes into every block, which needs no parameter on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(x * 2 + y)
        return y.square().mean()


def test_the_batch_itself_may_go_to_every_layer() -> None:
    check_all_cuts(Added(), ((torch.randn(2, 3),), (torch.randn(4, 3),)))


def test_evaluation() -> None:
    model = Frame()
    chain = Chain(model, lambda: model(*patches(2)))
    model.eval()
    inputs = patches(3)
    with torch.no_grad():
        expected = model(*inputs)
        hidden = chain.run(0, 2, lambda: model(*inputs))
        hidden = chain.run(2, 4, lambda: model(*inputs), hidden)
        assert torch.equal(chain.run(4, 5, lambda: model(*inputs), hidden), expected)


def test_a_message_is_not_written_into() -> None:
    model = vgg(flat=True)
    inputs = pictures(2)
    chain = Chain(model, lambda: classify(model, inputs))
    hidden = chain.run(0, 2, lambda: classify(model, inputs)).detach()
    before = hidden.clone()
    chain.run(2, 3, lambda: classify(model, inputs), hidden)
    assert torch.equal(hidden, before)


def test_cutting_leaves_the_model_as_it_was() -> None:
    model = vgg(flat=False)
    model.features[0].weight.requires_grad_(False)  # type: ignore[union-attr,index,operator]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = pictures(2)
    random = torch.get_rng_state()
    Chain(model, lambda: classify(model, inputs))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["features.0.weight"]
    assert gradients(model) == {}


class Counting(Plain):
    """Counts its forwards in a buffer that it makes anew, and has one whose elements share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shared", torch.ones(1).expand(3))

    def body(self, x: Tensor, step: int) -> Tensor:
        self.count = self.count + self.shared.sum()
        return super().body(x, step)


def test_cutting_leaves_buffers_that_are_made_anew() -> None:
    model = Counting()
    before = model.count
    Chain(model, lambda: model(*tokens(2)))
    assert model.count is before and not before.any()
    model(*tokens(2))
    assert model.count == 3


def test_named_blocks() -> None:
    model = build("Plain")
    chain = Chain(model, lambda: model(*tokens(2)), ["blocks.0", "blocks.2"])
    assert [layer.name for layer in chain.layers] == ["prefix", "blocks.0", "blocks.2", "suffix"]
    between = [name for name in chain.layers[1].parameters if name.startswith("blocks.1.")]
    assert len(between) == 6
    equal(in_parts(chain, tokens(3), model, [0, 1, 2, 3]), whole(build("Plain"), tokens(3)))
    other = build("Plain")
    assert Chain(other, lambda: other(*tokens(2)), ["Block"]).blocks == 3
    with pytest.raises(PlanError, match=r"'Blokk', which is no class.*Did you mean 'Block'"):
        Chain(other, lambda: other(*tokens(2)), ["Blokk"])


def test_layers_of_a_model_with_adapters_are_those_of_its_base() -> None:
    peft = pytest.importorskip("peft")
    base, inputs = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(1, 4)
    adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules="all-linear"))
    chains = [Chain(model, partial(model, inputs)) for model in (base, adapted)]
    for name in ("2", "base_model.model.2"):
        assert chains[0].number(name) == chains[1].number(name) == 3
    with pytest.raises(ModelError, match="no layer '9' to cut before; its layers are prefix, 0, 1, 2, 3, suffix"):
        chains[1].number("9")


def test_a_stand_in_that_is_used_is_seen() -> None:
    """What passes autograd unseen does not become a loss that is silently wrong."""

    class Unseen(Plain):
        def body(self, x: Tensor, step: int) -> Tensor:
            first = x.detach()
            return super().body(x, step) + first

    model = Unseen()
    chain = Chain(model, lambda: model(*tokens(2)))
    hidden = chain.run(0, 2, lambda: model(*tokens(2)))
    assert hidden.isfinite().all()
    assert chain.run(2, 5, lambda: model(*tokens(2)), hidden).isnan()


class Unused(Plain):
    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


class WithoutGradients(Plain):
    def body(self, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x)


class Integers(Plain):
    """What enters the second block is no floating-point tensor."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([nn.Embedding(13, 13) for _ in range(2)])

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return self.blocks[1](self.blocks[0](tokens).argmax(-1)).square().mean()


class Numbered(Plain):
    """The model multiplies by an integer parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([2, 3]), requires_grad=False)

    def body(self, x: Tensor, step: int) -> Tensor:
        return super().body(x, step) * self.number[0]


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (Unused, "The block 'blocks.1' did not run in a forward of the example; name the blocks of the chain with "
     "units=(...)."),
    (lambda: build("CheckpointedInside"), "The block 'blocks.0' did not run in a forward of the example"),
    (lambda: build("Tiny"), "The model has no repeated blocks to cut between; name its blocks with units=(...), or use "
     "pipeline_parallel=1."),
    *((kind, "The block 'blocks.0' runs under torch.no_grad, or under torch.utils.checkpoint with use_reentrant=True, "
       "which hide from a stage what its backward needs; switch that off in the model (recompute='blocks' recomputes "
       "whole chunks instead), name other blocks with units=(...), or use pipeline_parallel=1.")
      for kind in (WithoutGradients, lambda: build("CheckpointedReentrant"))),
    (Numbered, "'number' is torch.int64 and a parameter of a module around the blocks. Autograd does not follow it, so "
     "the layer that uses it is not known; register it as a buffer."),
    (Integers, "The block 'blocks.0' takes or returns no floating-point tensor to hand on to the next stage; name "
     "other blocks with units=(...)."),
]  # fmt: skip


@pytest.mark.parametrize("kind, said", REFUSED)
def test_what_is_no_chain_is_refused(kind: Callable[[], nn.Module], said: str) -> None:
    model = kind()
    with pytest.raises(ModelError) as refused:
        Chain(model, lambda: model(*tokens(2)))
    assert said in str(refused.value)
    assert model(*tokens(2)).isfinite()  # it still runs as it is


def test_a_model_partly_on_meta_is_refused() -> None:
    model = build("Plain")
    model.head.to("meta")  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"'head.weight' is on the meta device and 'blocks.2.down.bias' is real; .*or"):
        Chain(model, lambda: model(*tokens(2)))


class Switching(Plain):
    """The step says in which order the blocks run, by their numbers."""

    def body(self, x: Tensor, step: Any) -> Tensor:
        for number in step or "012":
            x = self.blocks[int(number)](x)
        return x


@pytest.mark.parametrize(
    "order, said",
    [
        ("021", "'blocks.2' ran after 'blocks.0', which is not the order of the example; all blocks of a chain must "
         "run for every microbatch, in one order; with blocks that are skipped at random set the rate of that "
         "(layerdrop) to 0, or use pipeline_parallel=1."),
        ("02", "'blocks.2' ran after 'blocks.0', which is not"),
        ("0012", "'blocks.0' ran after 'blocks.0', which is not"),
        ("01", "The forward ended before 'blocks.2' ran, which runs in the example; all blocks of a chain must run for "
         "every microbatch, in one order;"),
    ],
)  # fmt: skip
def test_another_order_than_in_the_example_is_refused(order: str, said: str) -> None:
    model = Switching()
    chain = Chain(model, lambda: model(*tokens(2)))
    with pytest.raises(ModelError) as refused:
        chain.run(0, 5, lambda: model(tokens(2)[0], order))
    assert said in str(refused.value)
    assert torch.equal(chain.run(0, 5, lambda: model(*tokens(2))), model(*tokens(2)))


def test_an_activation_of_another_kind_than_in_the_example_is_refused() -> None:
    model = Plain()
    chain = Chain(model, lambda: model(*tokens(2)))
    model.embed.forward = lambda rows: rows  # type: ignore[method-assign,assignment]
    with pytest.raises(ModelError, match=r"'blocks.0' takes or returns no floating-point tensor"):
        chain.run(0, 1, lambda: model(*tokens(2)))


def test_an_error_in_the_model_passes_through_and_ends_the_run() -> None:
    model = build("Plain")
    chain = Chain(model, lambda: model(*tokens(2)))
    with pytest.raises(IndexError):
        chain.run(0, 2, lambda: model(torch.full((2, 6), 99)))
    assert torch.equal(model(*tokens(3)), build("Plain")(*tokens(3)))


SIZE = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 1, "use_cache": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**SIZE, "tie_word_embeddings": True},
    "MixtralForCausalLM": {**SIZE, "num_local_experts": 4},
    "Gemma2ForCausalLM": {**SIZE, "head_dim": 4, "sliding_window": 3, "num_hidden_layers": 4},
    "GPT2LMHeadModel": {"vocab_size": 32, "n_embd": 8, "n_layer": 3, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
}


def hugging_face(name: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**{**FAMILIES[name], **changes})).train()
    return model


def sentences(rows: int, length: int) -> dict[str, Tensor]:
    """The last row is padded on the right."""
    rest = torch.randint(3, 32, (rows, length))
    mask = torch.ones_like(rest)
    mask[-1, -2:] = 0
    return {"input_ids": rest, "labels": rest, "attention_mask": mask}


def loss_of(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_an_unmodified_hugging_face_model(name: str) -> None:
    model = hugging_face(name)
    example, other = sentences(2, 8), sentences(3, 6)
    expected = whole(model, other, loss_of)
    equal(on_stages(model, example, other, [0, 2, 3], loss_of), expected)
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: loss_of(cut, example))
    equal(in_parts(chain, other, cut, [0, 1, 4], loss_of), expected)


class Pooled(nn.Module):
    """A head with a parameter of its own around attention, whose output layer is read and never called (SigLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = Pooling()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        pooled: Tensor = self.head(x)
        return pooled.square().mean()


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.attention(self.probe.expand(len(x), -1, -1), x, x)[0]
        return pooled


def test_a_layer_that_is_read_and_not_called_is_where_it_is_read() -> None:
    chain = check_all_cuts(Pooled(), ((torch.randn(2, 3, 4),), (torch.randn(3, 3, 4),)))
    assert "head.attention.out_proj.weight" in chain.layers[-1].parameters


class Asking(Plain):
    """Asks modules where their inputs belong, and needs values of what it moves there (Llama 4)."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        tokens = tokens.to(self.embed.weight.device)
        x = self.embed(tokens[:, :-1])
        places = torch.arange(x.shape[1], device=next(self.parameters()).device)
        places = places.to(self.blocks[0].up.weight.device).to(self.blocks[2].up.weight.device)
        assert (places.diff() == 1).all()
        logits = self.head(self.body(x, step).to(self.head.weight.device))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].to(self.head.weight.device).flatten())


def test_modules_of_other_stages_say_where_their_inputs_belong() -> None:
    example, more = (batch(0, 0, 1, 2),), (batch(1, 0, 1, 3),)
    check_all_cuts(Asking(), (example, more))
    with torch.device("meta"):
        model = Asking()
    chain = Chain(model, lambda: model(*example), device=torch.device("cpu"))
    assert [list(layer.parameters) for layer in (chain.layers[0], chain.layers[-1])] == [
        ["embed.weight"],
        ["head.weight"],
    ]
    assert all(parameter.is_meta for parameter in model.parameters())
    entering = chain.boundary(3, lambda: model(*more))
    assert (entering.shape, entering.device.type) == ((3, 5, 10), "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
