"""The gated delta rule (arXiv:2412.06464) in chunks of tokens, from batched products in torch.

A head's state S [d, e] goes through the tokens: S <- exp(g) S, then S <- S + beta k (v - S^T k)^T; the output is S^T q.
Within a chunk this is a triangular system of its tokens, solved for all chunks at once (arXiv:2406.06484). What a
chunk does to the state is linear, S <- M S + N, so that one product per chunk is left to do one after another. Must
agree with `torch_chunk_gated_delta_rule` of Megatron-core and transformers, which loops over rows and chunks in
Python: about 2,000 kernels for 4,096 tokens, and each kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 64
L2_EPS = 1e-6


def gated_delta_rule(
    query: Tensor,  # [b, s, k, d]
    key: Tensor,  # [b, s, k, d]
    value: Tensor,  # [b, s, v, e], v a multiple of k: a key head's value heads are next to each other
    log_decay: Tensor,  # [b, s, v], at most 0
    beta: Tensor,  # [b, s, v]
) -> Tensor:  # [b, s, v, e], of value's dtype
    """Outputs of a state that is zero before the first token; queries and keys are normalized to length 1 here.

    Computes in fp32. The backward pass computes all but the arguments again, which keeps memory at theirs.
    """
    arguments = query, key, value, log_decay, beta
    out: Tensor = checkpoint(_rule, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def _rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    batch, length, heads, size = value.shape

    def by_chunk(part: Tensor) -> Tensor:
        """[b, s, heads, ...] as [n, b * v, C, ...] in fp32, with zeros for the tokens that the last chunk lacks."""
        part = F.pad(part.float(), (0, 0) * (part.dim() - 2) + (0, -length % CHUNK_TOKENS))
        part = part.unflatten(1, (-1, CHUNK_TOKENS)).movedim((1, 3), (0, 2))  # [n, b, heads, C, ...]
        return part.repeat_interleave(heads // part.size(2), 2).flatten(1, 2)

    q, k, v, beta, decays = (by_chunk(part) for part in (query, key, value, beta, log_decay))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS) for part in (q, k))
    q, beta, decays = q * key.size(-1) ** -0.5, beta[..., None], decays.cumsum(-1)
    since_begin, until_end = decays[..., None].exp(), (decays[..., -1:] - decays)[..., None].exp()
    later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    between = (decays[..., :, None] - decays[..., None, :]).masked_fill(later, -torch.inf).exp()  # of later tokens none

    # Each token's new value lacks what those before it in the chunk, and the state before the chunk, have of its key.
    system = (k * beta) @ k.transpose(-1, -2) * between
    right = torch.cat((v * beta, k * beta * since_begin), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, of_state = solved.split((size, k.size(-1)), -1)  # new values are values - of_state @ S
    kept = (k * until_end).transpose(-1, -2)
    total = decays[..., -1, None, None].exp()
    identity = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    states = _States.apply(total[:-1] * identity - kept[:-1] @ of_state[:-1], kept[:-1] @ values[:-1])
    out = (q * since_begin) @ states + (q @ k.transpose(-1, -2) * between) @ (values - of_state @ states)
    out = out.unflatten(1, (batch, heads)).movedim((0, 3), (1, 2)).flatten(1, 2)  # [b, n * C, v, e]
    return out[:, :length].to(value.dtype)


class _States(torch.autograd.Function):
    """States [n, h, d, e] before each chunk, of which the first is 0 and another M S + N of the one before it."""

    @staticmethod
    def forward(context: Any, factors: Tensor, terms: Tensor) -> Tensor:
        """M [n - 1, h, d, d] and N [n - 1, h, d, e]."""
        states = terms.new_empty(len(terms) + 1, *terms.shape[1:])
        states[0] = 0
        for number, (factor, term) in enumerate(zip(factors, terms, strict=True)):
            torch.baddbmm(term, factor, states[number], out=states[number + 1])
        context.save_for_backward(factors, states)
        return states

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        factors, states = context.saved_tensors
        totals = grad.clone()  # with what a state's successors make of it
        for number in reversed(range(len(factors))):
            totals[number].baddbmm_(factors[number].transpose(-1, -2), totals[number + 1])
        return totals[1:] @ states[:-1].transpose(-1, -2), totals[1:]
