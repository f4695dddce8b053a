"""Transformer layers replayed as CUDA graphs: the host launches a layer in two calls instead of about eighty.

With short kernels, of a small model or of few tokens, the GPU waits for the host: a layer's forward and backward pass
take 2 to 4 ms of Python, whatever their size. So both are captured once per layer, at the first microbatch, and
replayed for all others. A graph reads and writes fixed addresses: the weights, their gradient buffers, and one
microbatch's activations, in a memory pool that all graphs share in the order in which they are replayed.

Megatron's own graphs need another random generator and refuse expandable segments; torch's make_graphed_callables
refuses modules with hooks, and captures in a mode that an allocation by the data loader's thread breaks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from pretrainkit.logs import get_logger
from pretrainkit.megatron.fp8.module import Fp8Module

log = get_logger(__name__)


class CudaGraphs:
    """Captures graphs on a side stream, into one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        torch.cuda.reset_peak_memory_stats()

    def warm_up(self, body: Callable[[], object]) -> None:
        """Run `body` as it will be captured: compiles kernels and initializes libraries, which a capture can't do."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture the work of `body` without running it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture: the one that pins batches does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        return graph

    def finish(self) -> int:
        """Bytes that replays write to although torch's allocator counts them as free, as they were after the captures.

        Resets the allocator's peak.
        """
        count = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return count


class _Pass:
    """One layer's forward and backward pass over one microbatch, with tensors at fixed addresses.

    The layer gets aliases of its weights: autograd would wait for the stream on which a weight was first used, which a
    capture must not do if that is the default stream.
    """

    def __init__(self, layer: Any, hidden: Tensor, rotary: Tensor | None) -> None:
        self._layer, self._rotary = layer, rotary
        self._weights = {name: _alias(weight) for name, weight in layer.named_parameters() if weight.requires_grad}
        self.hidden = hidden.detach().requires_grad_()  # [s, b, h]
        self.output: Tensor
        self.output_gradient: Tensor
        self.hidden_gradient: Tensor

    def forward(self) -> Tensor:
        inputs = {"hidden_states": self.hidden, "attention_mask": None, "rotary_pos_emb": self._rotary}
        self.output, _ = torch.func.functional_call(self._layer, self._weights, kwargs=inputs)
        return self.output

    def backward(self) -> Tensor:
        """The gradient of `hidden`; those of the weights are added to Megatron's buffers."""
        weights = tuple(self._weights.values())
        self.hidden_gradient, *gradients = torch.autograd.grad(
            self.output, (self.hidden, *weights), self.output_gradient
        )
        for weight, gradient in zip(weights, gradients, strict=True):
            if not weight.grad_added_to_main_grad:  # else the wgrad GEMM has done it
                weight.main_grad.add_(gradient)
        return self.hidden_gradient


def _alias(weight: Any) -> Any:
    """A leaf of another autograd graph that shares the weight's storage and gradient buffer."""
    alias: Any = weight.detach().requires_grad_()
    alias.__dict__.update(weight.__dict__, grad_added_to_main_grad=False)
    return alias


class _Layer:
    """A layer's two graphs, its weights, and its modules, listed once."""

    def __init__(self, module: Any, forward: torch.cuda.CUDAGraph) -> None:
        self.forward = forward
        self.backward: torch.cuda.CUDAGraph
        self.weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._modules = list(module.modules())

    def await_weights(self) -> None:
        """Run Megatron's forward pre-hooks: with overlapped parameter gathering they wait for the layer's weights.

        Then make the weights' FP8 copies, which the graphs read, where they aren't of this step.
        """
        for module in self._modules:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        for module in self._modules:
            if isinstance(module, Fp8Module):
                module.update_copies()


class GraphedLayers:
    """Replaces a transformer block's forward, without tensor and pipeline parallelism.

    Evaluation falls back to eager execution, and so does a microbatch that has not the first one's shape or has an
    attention mask.
    """

    def __init__(self, block: TransformerBlock, data_parallel: Any) -> None:
        """`data_parallel`: Megatron's DistributedDataParallel around the model, which owns the gradient buffers."""
        self._block, self._data_parallel = block, data_parallel
        self._eager_forward = block.forward
        self.uncounted_bytes = 0
        self._layers: list[_Layer] = []
        self._failed = False
        self._rotary: Tensor | None = None
        self._hidden: Tensor
        self._output: Tensor
        self._output_gradient: Tensor
        self._hidden_gradient: Tensor

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """TransformerBlock's: hidden states [s, b, h] to the normed ones that the output layer takes."""
        is_special = any(value is not None for value in (attention_mask, *others.values()))
        if self._block.training and torch.is_grad_enabled() and not is_special:
            if not self._layers and not self._failed:
                self._try_to_capture(hidden_states, rotary_pos_emb)
            if self._layers and hidden_states.shape == self._hidden.shape and rotary_pos_emb is self._rotary:
                normed: Tensor = self._block.final_layernorm(Replay.apply(self, hidden_states))
                return normed
        return self._eager_forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **others)

    def _try_to_capture(self, hidden: Tensor, rotary: Tensor | None) -> None:
        try:
            self._capture(hidden, rotary)
        except RuntimeError as error:  # CUDA errors are RuntimeErrors
            self._failed = True
            _restore_generator()
            log.warning("can't capture the layers as CUDA graphs, falling back to eager execution: %s", error)

    def _capture(self, hidden: Tensor, rotary: Tensor | None) -> None:
        graphs = CudaGraphs()
        for module in self._block.modules():
            if isinstance(module, Fp8Module):
                module.update_copies()  # of this step from here on: the capture doesn't make them
        # The first of a kind compiles what all of it need.
        for layer in {id(type(layer.mlp)): layer for layer in self._block.layers}.values():
            _warm_up(graphs, layer, hidden, rotary)
        layers, passes = [], []
        with _capturing():
            output = hidden.detach().clone()
            for module in self._block.layers:
                passes.append(current := _Pass(module, output, rotary))
                layers.append(_Layer(module, graphs.capture(current.forward)))
                output = current.output
            self._hidden, self._output = passes[0].hidden, output.detach()
            self._output_gradient = gradient = torch.zeros_like(output)
            for layer in reversed(layers):
                # Each pass is freed once its backward is captured, so that earlier layers reuse its memory.
                current = passes.pop()
                current.output_gradient = gradient
                layer.backward = graphs.capture(current.backward)
                gradient = current.hidden_gradient
        self._hidden_gradient = gradient
        self._layers, self._rotary = layers, rotary
        del current
        self.uncounted_bytes = graphs.finish()

    def replay_forward(self, hidden: Tensor) -> Tensor:
        """The last layer's output, at an address that the next microbatch overwrites."""
        self._hidden.copy_(hidden)
        for layer in self._layers:
            layer.await_weights()
            layer.forward.replay()
        return self._output.detach()

    def replay_backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the first layer's input; a layer's weight gradients are ready once its replay is enqueued."""
        self._output_gradient.copy_(gradient)
        for layer in reversed(self._layers):
            layer.backward.replay()
            if self._data_parallel.ddp_config.overlap_grad_reduce:
                for weight in layer.weights:
                    self._data_parallel.param_to_bucket_group[weight].register_grad_ready(weight)
        return self._hidden_gradient.detach()


class Replay(torch.autograd.Function):
    """The forward and backward pass of all layers as one autograd node."""

    @staticmethod
    def forward(ctx: Any, layers: GraphedLayers, hidden: Tensor) -> Tensor:
        ctx.layers = layers
        return layers.replay_forward(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.layers.replay_backward(gradient)


def _warm_up(graphs: CudaGraphs, layer: Any, hidden: Tensor, rotary: Tensor | None) -> None:
    """Run both passes of a layer with a zero gradient, which leaves the weights' gradient buffers unchanged."""
    trial = _Pass(layer, torch.zeros_like(hidden), rotary)
    trial.output_gradient = torch.zeros_like(hidden)
    graphs.warm_up(trial.forward)
    graphs.warm_up(trial.backward)


def _restore_generator() -> None:
    """Take torch's generator out of a failed capture: it would refuse to work outside of it."""
    if torch.cuda.is_available():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _capturing() -> Iterator[None]:
    """Turn Megatron's hooks off during a capture, and Python's collector: destroying an old graph would end it."""
    gc.collect()
    gc.disable()
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()
        gc.enable()


def install(data_parallel: Any) -> GraphedLayers:
    """Let the model in Megatron's DistributedDataParallel capture its layers at the first microbatch, then replay."""
    (block,) = (module for module in data_parallel.modules() if isinstance(module, TransformerBlock))
    layers = GraphedLayers(block, data_parallel)
    block.forward = layers.forward
    return layers
