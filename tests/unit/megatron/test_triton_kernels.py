"""The Triton kernels against plain torch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from pretrainkit.megatron.triton.cross_entropy import BLOCK, vocab_parallel_cross_entropy
from pretrainkit.megatron.triton.expert_swiglu import expert_swiglu
from pretrainkit.megatron.triton.grouped_wgrad import add_weight_gradients
from pretrainkit.megatron.triton.head_norm import head_norm
from pretrainkit.megatron.triton.rms_norm import rms_norm_with_residual
from pretrainkit.megatron.triton.rotary import rotate_heads, rotate_qkv
from pretrainkit.megatron.triton.rows import gather, sum_by_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _angles(length: int, size: int) -> Tensor:
    half = torch.outer(torch.arange(length, device=DEVICE), 10000 ** -torch.linspace(0, 1, size // 2, device=DEVICE))
    return torch.cat((half, half), dim=-1)[:, None, None, :]


@pytest.mark.parametrize("columns", [BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_cross_entropy_and_its_gradient_are_torchs(columns: int) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(3, 2, columns, device=DEVICE)
    targets = torch.randint(columns, (3, 2), device=DEVICE)
    targets[0, 0], targets[0, 1] = 0, columns - 1
    weights = torch.rand(3, 2, device=DEVICE)
    expected_logits = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        expected_logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(3, 2)
    (expected * weights).sum().backward()

    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1, targets)
    (loss * weights).sum().backward()

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad, expected_logits.grad, rtol=1e-5, atol=1e-6)


def test_cross_entropy_of_extreme_logits_is_finite() -> None:
    logits = torch.zeros(1, 1, 64, device=DEVICE)
    logits[0, 0, 3], logits[0, 0, 4] = 3e38, -3e38
    loss = vocab_parallel_cross_entropy(logits.clone(), torch.tensor([[3]], device=DEVICE))
    assert loss.item() == 0


def test_cross_entropys_backward_runs_once() -> None:
    leaf = torch.randn(1, 2, 64, device=DEVICE, requires_grad=True)
    loss = vocab_parallel_cross_entropy(leaf * 1, torch.zeros(1, 2, dtype=torch.long, device=DEVICE)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


@pytest.mark.parametrize("queries", [1, 3], ids=["no groups", "grouped queries"])
@pytest.mark.parametrize("size", [16, 20], ids=["power of two", "other head size"])
def test_fused_query_key_value_rotation_is_megatrons(queries: int, size: int) -> None:
    torch.manual_seed(0)
    length, batch, groups = 5, 2, 3
    widths = [queries * size, size, size]
    angles = _angles(length, size)
    mixed = torch.randn(length, batch, groups, sum(widths), device=DEVICE, requires_grad=True)
    query, key, value = mixed.split(widths, dim=3)
    query = query.reshape(length, batch, -1, size)
    expected = (_apply_rotary_pos_emb_bshd(query, angles), _apply_rotary_pos_emb_bshd(key, angles), value)
    gradients = [torch.randn_like(part) for part in expected]
    (expected_gradient,) = torch.autograd.grad(expected, mixed, gradients)

    found = rotate_qkv(mixed, angles, angles, widths)
    (gradient,) = torch.autograd.grad(found, mixed, gradients)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_rotation_of_single_heads_is_megatrons() -> None:
    torch.manual_seed(0)
    angles = _angles(7, 12)
    heads = torch.randn(7, 2, 5, 12, device=DEVICE, requires_grad=True)
    expected = _apply_rotary_pos_emb_bshd(heads, angles)
    gradient = torch.randn_like(expected)
    (expected_gradient,) = torch.autograd.grad(expected, heads, gradient)

    found = rotate_heads(heads, angles)
    (found_gradient,) = torch.autograd.grad(found, heads, gradient)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_interleaved_rotation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="interleaved"):
        rotate_heads(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), interleaved=True)


@pytest.mark.parametrize("columns", [64, 72], ids=["power of two", "other size"])
@pytest.mark.parametrize("rows", [(1, 1), (5, 3)], ids=["one row", "more rows than programs"])
def test_norm_with_the_residual_stream_is_torchs(columns: int, rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(*rows, columns, device=DEVICE), 1 + torch.rand(columns, device=DEVICE)
    block, past = torch.randn(2, *rows, columns, device=DEVICE)

    def gradients(norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        normed, kept = norm(*leaves)
        (normed * block + kept * past).sum().backward()
        return [normed, *(leaf.grad for leaf in leaves)]

    found = gradients(lambda hidden, weight: rms_norm_with_residual(hidden, weight, 1e-5))
    expected = gradients(lambda hidden, weight: (F.rms_norm(hidden, (columns,), weight, 1e-5), hidden))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_norm_alone_has_torchs_gradient() -> None:
    hidden, weight = torch.randn(4, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    leaf, expected = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    rms_norm_with_residual(leaf, weight, 1e-5)[0].pow(3).sum().backward()
    F.rms_norm(expected, (64,), weight, 1e-5).pow(3).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (33, 2048 + 3)])
def test_rows_are_copied_and_added_up(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn((rows, columns), generator=generator).to(DEVICE)
    index = torch.randint(rows, (11,), generator=generator).to(DEVICE)
    assert torch.equal(gather(source, index), source[index])
    begins = torch.tensor([0, 3, 3, 4, 11])
    sums = torch.stack([source[index[a:b]].sum(0) for a, b in itertools.pairwise(begins)])
    torch.testing.assert_close(sum_by_token(source, index, begins.to(DEVICE)), sums)
    assert gather(source, index[:0]).shape == (0, columns)


@pytest.mark.parametrize("ffn", [24, 1024 + 8])
@pytest.mark.parametrize(("limit", "alpha"), [(0.0, 1.0), (1.0, 1.702)], ids=["silu", "clamped"])
def test_swiglu_of_experts_and_its_gradients_are_torchs(ffn: int, limit: float, alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = 2 * torch.randn((9, 2 * ffn), generator=generator).to(DEVICE)
    shares, above = torch.rand(9, generator=generator).to(DEVICE), torch.randn((9, ffn), generator=generator).to(DEVICE)
    found = {}
    for name in ("ours", "torch"):
        leaf, share = gate_up.clone().requires_grad_(), shares.clone().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        if name == "ours":
            inner = expert_swiglu(leaf, share, limit, alpha)
        elif limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1) * share[:, None]
        else:
            inner = F.silu(gate) * up * share[:, None]
        (inner * above).sum().backward()
        found[name] = inner.detach(), leaf.grad, share.grad
    for ours, theirs in zip(found["ours"], found["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "size"), [((3, 2, 5), 128), ((7, 1, 3), 80), ((300, 1, 2), 64)])
def test_norms_of_heads_and_their_gradients_are_torchs(shape: tuple[int, ...], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, above = torch.randn((2, *shape, size), generator=generator).to(DEVICE)
    weight = torch.rand(size, generator=generator).to(DEVICE)
    found = {}
    for name in ("ours", "torch"):
        leaf, factors = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = head_norm(leaf, factors, 1e-6) if name == "ours" else F.rms_norm(leaf, (size,), factors, 1e-6)
        (out * above).sum().backward()
        found[name] = out.detach(), leaf.grad, factors.grad
    for ours, theirs in zip(found["ours"], found["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n", "k"), [(128, 256), (48, 24)])
def test_weight_gradients_of_experts_are_added_to_the_buffer(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([70, 70, 75, 140], dtype=torch.int32)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no products of bf16
    gradient, rows = (torch.randn((140, size), generator=generator).to(DEVICE, dtype) for size in (n, k))
    main_grad = torch.ones((4, n, k), device=DEVICE)
    add_weight_gradients(gradient, rows, ends.to(DEVICE), main_grad)
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        expected = 1 + gradient[begin:end].float().t() @ rows[begin:end].float()
        torch.testing.assert_close(main_grad[expert], expected, rtol=1e-3, atol=1e-3)
