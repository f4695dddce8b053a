"""Tensor-parallel products under sequence parallelism that go on while their exchange does.

Megatron gathers a layer's input from all ranks and multiplies then; after the next product it sums and scatters the
result. Here products go by the ranks' parts: while one part is multiplied, copy engines bring another, out of
memory that the ranks of a node see of each other (torch's symmetric memory). Its operators
`fused_all_gather_matmul` and `fused_matmul_reduce_scatter` do the same in about thirty calls, whose 0.5 ms and more
on the host a layer of the 1B shape doesn't have; these are about ten.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from pretrainkit.logs import get_logger
from pretrainkit.megatron.wgrad import WeightGradientProduct

NUM_BUFFERS = 3
"""A rank writes a buffer again two operations later. Others may read it until the end of the next one, and all meet
in the one after that, before it is written."""

log = get_logger(__name__)


class Exchange:
    """Memory that the ranks of a group see of each other, and the stream on which parts arrive.

    All ranks must call the same methods in the same order, with the same sizes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._arrivals = torch.cuda.Stream()
        self._memory: list[Tensor] = []
        self._buffers: list[Any] = []
        self._turn = 0

    def open(self, num_bytes: int) -> None:
        """Begin an operation, with a buffer of at least this size that no rank reads any more."""
        if not self._memory or num_bytes > self._memory[0].nbytes:
            self._grow(num_bytes)
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def own(self, shape: torch.Size, dtype: torch.dtype, place: int = 0) -> Tensor:
        """Elements of this rank's buffer from `place` on, to be written before the others are met."""
        return self._buffers[self._turn].get_buffer(self.rank, shape, dtype, place)

    def meet(self) -> None:
        """Let the GPU wait until all ranks have written what they wrote before."""
        self._buffers[self._turn].barrier()
        self._arrivals.wait_stream(torch.cuda.current_stream())

    def fetch(self, into: Tensor, source: int, place: int = 0) -> torch.cuda.Event:
        """Copy what rank `source` has at `place` beside the current stream's work; the event is its end."""
        with torch.cuda.stream(self._arrivals):
            into.copy_(self._buffers[self._turn].get_buffer(source, into.shape, into.dtype, place))
            return self._arrivals.record_event()

    def wait(self, arrival: torch.cuda.Event) -> None:
        """Let the current stream go on after `arrival`."""
        torch.cuda.current_stream().wait_event(arrival)

    def _grow(self, num_bytes: int) -> None:
        """Take new buffers, when no rank uses the old ones."""
        torch.cuda.synchronize()
        torch.distributed.barrier(self._group)
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = [symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._buffers = [symmetric_memory.rendezvous(tensor, self._group) for tensor in self._memory]


@functools.cache
def exchange_of(group: ProcessGroup) -> Exchange | None:
    """The exchange of the group's ranks, for as long as they live; None on all if one of them can't have it."""
    problem = _unreachable()
    if not _any_has(problem, group):
        exchange = Exchange(group)
        try:
            exchange.open(2**20)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        if not _any_has(problem, group):
            return exchange
    log.warning("NCCL exchanges the parts of tensor-parallel ranks: %s", problem or "another rank can't see memory")
    return None


def _any_has(problem: str, group: ProcessGroup) -> bool:
    count = torch.tensor([bool(problem)], dtype=torch.int32, device="cuda")
    torch.distributed.all_reduce(count, group=group)
    return bool(count.item())


def _unreachable() -> str:
    """Which card this rank's can't read, in words; empty if it reads all of this node."""
    own = torch.cuda.current_device()
    others = [card for card in range(torch.cuda.device_count()) if card != own]
    cards = [str(card) for card in others if not torch.cuda.can_device_access_peer(own, card)]
    return f"card {own} has no peer access to {', '.join(cards)}" if cards else ""


def start_gathering(exchange: Exchange, part: Tensor) -> tuple[Tensor, dict[int, Any]]:
    """Let the parts [s/tp, b, k] of all ranks come together in [tp, s/tp, b, k], and each other rank's arrival."""
    exchange.open(part.nbytes)
    exchange.own(part.shape, part.dtype).copy_(part)
    exchange.meet()
    gathered = part.new_empty((exchange.size, *part.shape))
    sources = [(exchange.rank + step) % exchange.size for step in range(1, exchange.size)]
    arrivals = {source: exchange.fetch(gathered[source], source) for source in sources}
    return gathered, arrivals


def gathered_product(exchange: Exchange, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' parts [s/tp, b, k] together but for this rank's [tp, s/tp, b, k], and the product of all of them with
    `weight` [k, n]: [s, b, n].
    """
    gathered, arrivals = start_gathering(exchange, part)
    product = part.new_empty((*gathered.shape[:-1], weight.shape[1]))
    torch.mm(part.flatten(0, -2), weight, out=product[exchange.rank].flatten(0, -2))
    for source, arrival in arrivals.items():
        exchange.wait(arrival)
        torch.mm(gathered[source].flatten(0, -2), weight, out=product[source].flatten(0, -2))
    return gathered, product.flatten(0, 1)


def scattered_product(exchange: Exchange, inputs: Tensor, weight: Tensor) -> Tensor:
    """This rank's rows [s/tp, b, n] of the sum over ranks of `inputs` [s, b, k] times `weight` [k, n].

    Others' rows go first, so that they are fetched while this rank's own are multiplied.
    """
    rows = inputs.unflatten(0, (exchange.size, -1))
    own = inputs.new_empty((*rows.shape[1:-1], weight.shape[1]))
    others = own.new_empty((exchange.size - 1, *own.shape))
    exchange.open(others.nbytes)
    arrivals = []
    for step in range(1, exchange.size):
        place = (step - 1) * own.numel()
        destination, source = (exchange.rank + step) % exchange.size, (exchange.rank - step) % exchange.size
        theirs = exchange.own(own.shape, own.dtype, place).flatten(0, -2)
        torch.mm(rows[destination].flatten(0, -2), weight, out=theirs)
        exchange.meet()
        arrivals.append(exchange.fetch(others[step - 1], source, place))
    torch.mm(rows[exchange.rank].flatten(0, -2), weight, out=own.flatten(0, -2))
    for other, arrival in zip(others, arrivals, strict=True):
        exchange.wait(arrival)
        own += other
    return own


class GatheredProduct(torch.autograd.Function):
    """A column-parallel product: `inputs` [s/tp, b, k] of all ranks times `weight` [n/tp, k], transposed."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, exchange: Exchange, accumulates: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.exchange, ctx.main_grad = exchange, _buffer_of(weight, accumulates)
        return gathered_product(exchange, inputs, weight.t())[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        gathered, arrivals = start_gathering(ctx.exchange, inputs)
        input_gradient = scattered_product(ctx.exchange, gradient, weight)
        gathered[ctx.exchange.rank] = inputs
        for arrival in arrivals.values():
            ctx.exchange.wait(arrival)
        return input_gradient, _weight_gradient(weight, ctx.main_grad, gathered, gradient), None, None


class ScatteredProduct(torch.autograd.Function):
    """A row-parallel product: `inputs` [s, b, k/tp] times `weight` [n, k/tp], transposed, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, exchange: Exchange, accumulates: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.exchange, ctx.main_grad = exchange, _buffer_of(weight, accumulates)
        return scattered_product(exchange, inputs, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        gathered, input_gradient = gathered_product(ctx.exchange, gradient, weight)
        gathered[ctx.exchange.rank] = gradient
        return input_gradient, _weight_gradient(weight, ctx.main_grad, inputs, gathered), None, None


def _buffer_of(weight: Any, accumulates: bool) -> Tensor | None:
    return getattr(weight, "main_grad", None) if accumulates else None


def _weight_gradient(weight: Any, main_grad: Tensor | None, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Of `weight` [n, k], added to its fp32 buffer where there is one; Megatron's hooks want a tensor then too."""
    inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
    if main_grad is None:
        return gradient.t() @ inputs
    WeightGradientProduct.wgrad_gemm_accum_fp32(inputs, gradient, main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
