"""Recording a plan over small modules with loaders of every kind; trying it on vLLM's own is in test_routes.py."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from colo.engine.plan import Copy, Fill, ReloadPlan, engine_tensors, record_plan
from colo.engine.strided import Strided
from colo.engine.trial import write_by_plan

Loader = Callable[["Model", str, Tensor], None]


class Model(nn.Module):
    """A fused matrix of two sources, a padded one, a tied one, a scale of one element and a buffer."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        self.load = load
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.padded = nn.Parameter(torch.full((5, 3), 7.0))
        self.head = nn.Module()
        self.head.weight = self.padded
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("cache", torch.arange(3.0))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, loaded in weights:
            self.load(self, name, loaded)
        return set()


SHAPES = {"q": (2, 4), "k": (4, 4), "padded": (4, 3), "scale": (1,)}


def load(model: Model, name: str, loaded: Tensor) -> None:
    """As vLLM's loaders do."""
    if name == "q":
        model.fused.data[:2].copy_(loaded)
    elif name == "k":
        model.fused.data.narrow(0, 2, 4).copy_(loaded)
    elif name == "padded":
        model.padded.data[:4].copy_(loaded)
        model.padded.data[4:].fill_(0)
    elif name == "scale":
        model.scale.data.fill_(loaded.item())


def but(name: str, does: Loader) -> Loader:
    """`load`, but for one source."""
    return lambda model, got, loaded: (does if got == name else load)(model, got, loaded)


def recorded(
    loader: Loader = load, shapes: dict[str, tuple[int, ...]] = SHAPES, preserved: Iterable[str] = ()
) -> tuple[Model, ReloadPlan]:
    model = Model(loader)
    stand_ins = [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
    return model, record_plan(model, engine_tensors(model), stand_ins, torch.float32, preserved)


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_a_plan_is_what_the_loader_copies_and_fills_and_nothing_is_written() -> None:
    model, plan = recorded()
    assert plan.sources == SHAPES
    assert plan.copies == [
        Copy(target="fused", places=Strided(0, (2, 4), (4, 1)), source="q", read=Strided(0, (2, 4), (4, 1))),
        Copy(target="fused", places=Strided(8, (4, 4), (4, 1)), source="k", read=Strided(0, (4, 4), (4, 1))),
        Copy(target="padded", places=Strided(0, (4, 3), (3, 1)), source="padded", read=Strided(0, (4, 3), (3, 1))),
        Copy(target="scale", places=Strided(0, (1,), (1,)), source="scale", read=Strided(0, (1,), (1,))),
    ]
    assert plan.fills == [Fill(target="padded", places=Strided(12, (1, 3), (3, 1)), value=0.0)]
    assert (plan.kept, plan.unused, plan.problems) == (["cache"], [], {})
    assert not model.fused.any()
    assert (model.padded == 7).all()
    assert model.scale.item() == 1


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_number_that_is_read_to_fill_one_element_is_a_copy(shape: tuple[int, ...]) -> None:
    _, plan = recorded(shapes=SHAPES | {"scale": shape})
    assert plan.problems == {}
    (copy,) = [copy for copy in plan.copies if copy.target == "scale"]
    assert (copy.source, copy.read.offset, copy.read.numel) == ("scale", 0, 1)


def test_writing_by_a_plan_is_what_the_loader_does() -> None:
    model, plan = recorded()
    expected = Model(load)
    with torch.no_grad():
        expected.load_weights(drawn().items())
    write_by_plan(plan, engine_tensors(model), drawn().items())
    for name, tensor in engine_tensors(expected).items():
        assert torch.equal(tensor, engine_tensors(model)[name]), name


def test_slices_casts_and_transposed_sources_are_followed_to_their_place() -> None:
    def sliced(model: Model, _: str, loaded: Tensor) -> None:
        model.fused.data[2:].copy_(loaded.to(torch.bfloat16).t().narrow(1, 2, 4).contiguous().narrow(0, 1, 4))

    model, plan = recorded(but("k", sliced), SHAPES | {"k": (6, 5)})
    assert plan.problems == {}
    copy = next(copy for copy in plan.copies if copy.source == "k")
    assert copy.read == Strided(11, (4, 4), (1, 5))
    source = torch.arange(30.0).view(6, 5)
    write_by_plan(plan, engine_tensors(model), [("k", source)])
    assert torch.equal(model.fused.data[2:], source.t()[1:5, 2:6])


def test_what_nobody_reads_is_named_as_unused() -> None:
    assert recorded(shapes=SHAPES | {"extra": (3,)})[1].unused == ["extra"]


def test_a_parameter_may_be_left_out_on_purpose() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "scale"}
    assert recorded(shapes=shapes)[1].problems == {"scale": "no tensor of the policy is copied there"}
    _, plan = recorded(shapes=shapes, preserved=["scale"])
    assert plan.problems == {}
    assert plan.kept == ["scale", "cache"]


def test_a_tensor_that_others_write_is_left_to_them() -> None:
    model = Model(load)
    own = {name: tensor for name, tensor in engine_tensors(model).items() if name != "fused"}
    stand_ins = [(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()]
    plan = record_plan(model, own, stand_ins, torch.float32)
    assert plan.problems == {}
    assert {copy.target for copy in plan.copies} == {"padded", "scale"}
    assert plan.unused == ["q", "k"]
    assert not model.fused.any()


def nothing(model: Model, _: str, loaded: Tensor) -> None:
    del model, loaded


def computes(model: Model, _: str, loaded: Tensor) -> None:
    model.fused.data[2:].copy_(loaded * 1.0)


def takes_vllms(model: Model, _: str, loaded: Tensor) -> None:
    del loaded
    model.fused.data[2:].copy_(model.fused.new_zeros(4, 4))


def adds(model: Model, _: str, loaded: Tensor) -> None:
    model.fused.data[2:].add_(loaded)


def writes_twice(model: Model, _: str, loaded: Tensor) -> None:
    model.fused.data[1:5].copy_(loaded)


def writes_half(model: Model, _: str, loaded: Tensor) -> None:
    model.fused.data[2:, :2].copy_(loaded[:, :2])


def writes_bytes(model: Model, _: str, loaded: Tensor) -> None:
    model.fused.data[2:].view(torch.int32).copy_(loaded)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (nothing, "8 of its 24 elements are written"),
        (computes, "computed by aten.mul.Tensor"),
        (takes_vllms, "copied from a tensor of vLLM's own"),
        (adds, "written by aten.add_.Tensor"),
        (writes_twice, "some of its elements are written twice"),
        (writes_half, "16 of its 24 elements are written"),
        (writes_bytes, "written as torch.int32, which it is not"),
    ],
)
def test_a_parameter_that_is_not_written_once_by_copies_is_a_problem(loader: Loader, why: str) -> None:
    assert recorded(but("k", loader))[1].problems == {"fused": why}


def reads_a_value(model: Model, name: str, loaded: Tensor) -> None:
    if loaded.sum().item() > 0:
        load(model, name, loaded)


def overwrites_the_source(model: Model, name: str, loaded: Tensor) -> None:
    load(model, name, loaded.mul_(2))


def test_a_loader_that_cannot_be_watched_is_a_problem_of_every_parameter() -> None:
    _, plan = recorded(but("k", reads_a_value))
    assert list(plan.problems) == [""]
    assert plan.problems[""].startswith("its loader does more than copy (")
    assert plan.kept == ["cache"], "buffers are kept all the same"
    _, plan = recorded(but("k", overwrites_the_source))
    assert plan.problems[""] == "its loader writes into the checkpoint's tensors (aten.mul_.Tensor)"
