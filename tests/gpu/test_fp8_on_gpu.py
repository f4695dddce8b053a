"""What only a GPU can show of FP8: its casts and products are those of the emulation, and its layers' gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_training
import pytest
import torch
from all_cards import NUM_CARDS
from gradients import LENGTH, SHAPE, one_rank
from torch import Tensor

from pretrainkit.config.schema import Fp8, Kernels
from pretrainkit.megatron import cuda_graphs, kernels, patches
from pretrainkit.megatron import model as megatron_model
from pretrainkit.megatron.fp8 import gemm, quantize, weights
from pretrainkit.megatron.fp8.quantize import FORWARD, GRADIENT, Fp8Tensor, Scaling

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < quantize.FIRST_CAPABILITY,
    reason="needs a GPU with FP8 products",
)
__all__ = ["one_rank"]
SIZES = [(256, 512), (1000, 1008), (2048, 4096)]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call a function as on a device without FP8."""

    def call(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (quantize, gemm):
                patch.setattr(module, "on_fp8_unit", lambda tensor: False)
            return function(*arguments, **settings)

    return call


def _rows(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(shape, device="cuda", generator=generator)
    values *= (2 * torch.randn(shape[0], 1, device="cuda", generator=generator)).exp()
    values[1] = 0
    return values.bfloat16()


def _assert_equal(found: Fp8Tensor, expected: Fp8Tensor, *, but: float = 0.0) -> None:
    """Equal but for a share of values, which a last bit of a sum or a sigmoid puts on the other side of a tie."""
    assert torch.equal(found.scales, expected.scales)
    differ = found.values.view(torch.uint8) != expected.values.view(torch.uint8)
    assert differ.float().mean().item() <= but


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("by_tensor", [False, True], ids=["row", "tensor"])
def test_casts_are_those_of_the_emulation(size: tuple[int, int], by_tensor: bool, emulated: Callable[..., Any]) -> None:
    scaling, (rows, columns) = Scaling(by_tensor), size
    values, weight = _rows(rows, columns), 1 + 0.1 * torch.randn(columns, device="cuda")
    gate_up, above = _rows(rows, 2 * columns, seed=1), 1e-4 * _rows(rows, columns, seed=2)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        stats = torch.zeros((2, 2, rows), device="cuda")
        found, expected = scaling.cast(values, dtype, stats[0]), emulated(scaling.cast, values, dtype, stats[1])
        _assert_equal(found, expected)
        assert torch.equal(*stats)
        _assert_equal(quantize.transpose(found), emulated(quantize.transpose, found))
    for function, arguments in (
        (scaling.normalize, (values, weight, 1e-5)),
        (scaling.swiglu, (gate_up,)),
        (scaling.swiglu_gradient, (above, gate_up)),
    ):
        (found, exact, *_), (expected, exact_expected, *_) = (
            function(*arguments, keep=True),
            emulated(function, *arguments, keep=True),
        )
        _assert_equal(found, expected, but=1e-4)
        torch.testing.assert_close(exact, exact_expected)


@pytest.mark.parametrize("by_tensor", [False, True], ids=["row", "tensor"])
def test_products_are_those_of_the_emulation(by_tensor: bool, emulated: Callable[..., Any]) -> None:
    assert gemm.can_add()
    scaling = Scaling(by_tensor)
    left, right = scaling.cast(_rows(512, 1024), GRADIENT), scaling.cast(_rows(256, 1024, seed=1), FORWARD)
    expected = emulated(gemm.matmul, left, right).float()
    error = (gemm.matmul(left, right) - expected).norm() / expected.norm()
    assert error < 4e-3  # fast accumulation, and bf16
    out = torch.randn((512, 256), device="cuda")
    added = out.clone()
    gemm.add_matmul(added, left, right)
    emulated(gemm.add_matmul, out, left, right)
    assert (added - out).norm() / out.norm() < 4e-3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_make_all_gradients_nan(value: float) -> None:
    gradient = _rows(64, 128)
    gradient[5, 7] = value
    for by_tensor in (False, True):
        small = Scaling(by_tensor).cast(gradient, GRADIENT)
        other = Scaling(by_tensor).cast(_rows(64, 128), FORWARD)
        out = torch.zeros((128, 128), device="cuda")
        gemm.add_matmul(out, quantize.transpose(small), quantize.transpose(other))
        assert out.isnan().all()
        assert gemm.matmul(small, other)[5].isnan().all()


def _chosen(fp8: bool) -> Kernels:
    return kernels.choose(
        layer_spec="torch",
        fused_kernels="auto",
        accelerator="gpu",
        precision="bf16",
        installed=kernels.installed_libraries(),
        layer_work=1.0,
        fp8=fp8,
    )


def _wrapped(fp8: Fp8 | None, precision: str = "bf16") -> Any:
    """A model with fixed weights in Megatron's data-parallel wrapper."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    chosen = _chosen(fp8 is not None) if precision == "bf16" else None
    if chosen:
        patches.apply_kernels(chosen)
    settings: dict[str, Any] = {"precision": precision, "kernels": chosen, "fp8": fp8}
    model: Any = megatron_model.build_model(
        SHAPE, padded_vocab_size=SHAPE.vocab_size, sequence_length=LENGTH, **settings
    ).cuda()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        values = 0.02 * torch.randn(parameter.shape, generator=generator) + ("norm" in name)
        parameter.data.copy_(values.bfloat16())
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def _gradients(
    fp8: Fp8 | None, precision: str = "bf16", recompute: str = "none", graphs: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and fp32 gradients of two fixed microbatches."""
    wrapped = _wrapped(fp8, precision)
    decoder = wrapped.module.decoder
    if recompute == "full":
        config = decoder.config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", 2
    for layer in decoder.layers:
        layer.recompute_mlp = recompute == "mlp"
    layers = cuda_graphs.install(wrapped) if graphs else None
    weights.expire()
    generator = torch.Generator().manual_seed(2)
    positions, losses = torch.arange(LENGTH, device="cuda").expand(2, LENGTH), []
    for _ in range(2):
        tokens = torch.randint(SHAPE.vocab_size, (2, LENGTH + 1), generator=generator).cuda()
        loss = wrapped(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        losses.append(loss.item())
    assert layers is None or len(layers._layers) == SHAPE.num_layers
    return losses, {name: weight.main_grad.clone() for name, weight in wrapped.module.named_parameters()}


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((found[name] - value).norm() / value.norm()).item() for name, value in expected.items()}


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_wgrad_bf16"])
def test_gradients_are_near_those_of_fp32(recipe: str) -> None:
    exact_losses, exact = _gradients(None, "fp32")
    losses, found = _gradients(Fp8(recipe))
    assert losses == pytest.approx(exact_losses, abs=0.02)
    bf16 = _errors(_gradients(None)[1], exact)
    for name, error in _errors(found, exact).items():
        print(f"{recipe} {name}: relative error {error:.4f}, bf16 {bf16[name]:.4f}")
        assert error < 0.2, name  # 3 bits of mantissa: 0.038 for each product on the way


@pytest.mark.parametrize("how", ["graphs", "full", "mlp"])
def test_graphs_and_recomputation_give_the_same(how: str) -> None:
    exact = _gradients(None, "fp32")[1]
    losses, eager = _gradients(Fp8())
    changed: dict[str, Any] = {"graphs": True} if how == "graphs" else {"recompute": how}
    found_losses, found = _gradients(Fp8(), **changed)
    assert found_losses == pytest.approx(losses, abs=1e-3)
    errors = _errors(eager, exact)
    for name, error in _errors(found, exact).items():
        # Sums in another order are rounded to bf16, and then to FP8, another way.
        assert error < 1.1 * errors[name] + 1e-3, name


def test_graphs_read_the_weights_of_the_step() -> None:
    """Weights change between steps: replayed layers must read the new FP8 copies."""
    found = {graphs: _losses_of_steps(graphs) for graphs in (False, True)}
    assert found[True] == pytest.approx(found[False], abs=5e-3)
    assert found[True][0] - found[True][-1] > 0.05


def _losses_of_steps(graphs: bool) -> list[float]:
    """Losses of one batch over steps of gradient descent."""
    wrapped, losses = _wrapped(Fp8()), []
    if graphs:
        cuda_graphs.install(wrapped)
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    tokens = torch.randint(SHAPE.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        weights.expire()
        wrapped.zero_grad_buffer()
        loss = wrapped(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.data.add_(parameter.main_grad, alpha=-0.2)
    return losses


@pytest.mark.parametrize(("cards", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_a_run_learns_as_in_bf16(cards: int, tp: int, tmp_path: Path) -> None:
    if cards > NUM_CARDS:
        pytest.skip(f"needs {cards} GPUs")
    words = f"--model 135m --layers 6 --gpus {cards} --tp {tp} --steps 8 --sequence_length 2048 --micro_batch_size 2"
    if tp > 1:
        words = words.replace("135m --layers 6", "1b --layers 2")  # 135m has nine heads
    arguments = bench_training.build_parser().parse_args([*words.split(), "--global_batch_size", "8"])
    bench_training.write_inputs(tmp_path, arguments)
    fp8 = bench_training.measure("fp8", arguments, tmp_path)
    bf16 = bench_training.measure("fused", arguments, tmp_path)
    assert fp8.losses == pytest.approx(bf16.losses, abs=0.1)
