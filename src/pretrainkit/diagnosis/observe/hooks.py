"""The patches in torch through which a training program is watched and changed, all made before it has begun.

Each costs one Python call per step, batch or collective; none is called per operation or per layer.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
import torch.utils.data
from torch.nn.attention import SDPBackend
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pretrainkit.diagnosis.observe import phases
from pretrainkit.diagnosis.observe.session import Session
from pretrainkit.diagnosis.observe.streams import Stream

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base", "barrier"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object"),
    *("broadcast_object_list", "monitored_barrier"),
)


def install(session: Session) -> None:
    """Patch torch in this process, for good."""
    _watch_loaders(session)
    _watch_backward(session)
    _watch_optimizers(session)
    _watch_modules(session)
    _watch_attention(session)
    _watch_reads(session)
    torch.save = _timed(session, torch.save, phases.CHECKPOINT)
    if torch.distributed.is_available():
        owners = [(torch.distributed, name) for name in COLLECTIVES if hasattr(torch.distributed, name)]
        for owner, name in (*owners, (torch._C._distributed_c10d.Work, "wait")):
            setattr(owner, name, _timed(session, getattr(owner, name), phases.COMMUNICATION))


def _timed(session: Session, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with session.clock.phase(phase):
            return original(*args, **kwargs)

    return timed


def _watch_loaders(session: Session) -> None:
    loader_class: Any = torch.utils.data.DataLoader
    make_iterator = loader_class.__iter__

    def iterate(loader: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return make_iterator(loader)
        return Stream(session, loader, functools.partial(make_iterator, loader))

    loader_class.__iter__ = iterate


class _Engine:
    """The autograd engine, its backward passes timed: everything that runs one comes through here."""

    def __init__(self, session: Session, engine: Any) -> None:
        self._session, self._engine = session, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._session.before_backward()
        with self._session.clock.phase(phases.BACKWARD):
            return self._engine.run_backward(*args, **kwargs)


def _watch_backward(session: Session) -> None:
    variable: Any = torch.autograd.Variable
    variable._execution_engine = _Engine(session, variable._execution_engine)


def _watch_optimizers(session: Session) -> None:
    clock = session.clock

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        clock.enter(phases.OPTIMIZER)
        # Lightning runs the whole step inside a closure.
        in_closure = clock.phase(phases.OTHER)
        if len(args) > 1 and callable(args[1]):
            args = (args[0], in_closure(args[1]), *args[2:])
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": in_closure(kwargs["closure"])}
        return args, kwargs

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        clock.leave()
        session.after_optimizer(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_modules(session: Session) -> None:
    """Find the outermost modules in the first steps; from then on only they are watched."""
    module_class: Any = torch.nn.Module
    call = module_class.__call__
    depth = 0

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth or not torch.is_grad_enabled() or not session.is_main_thread():
            return call(module, *args, **kwargs)
        depth += 1
        if not any(known is module for known in session.modules):
            session.modules.append(module)
        try:
            with session.clock.phase(phases.FORWARD):
                return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def narrow() -> None:
        module_class.__call__ = call
        for module in session.modules:
            module.forward = _timed(session, module.forward, phases.FORWARD)

    module_class.__call__ = watched
    session.stop_looking_for_modules = narrow


def _watch_attention(session: Session) -> None:
    attend = F.scaled_dot_product_attention

    def watched(query: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return attend(query, *args, **kwargs)
        if not session.attention:
            session.attention, session.attention_dtype = "unknown", str(query.dtype)
            with contextlib.suppress(RuntimeError, TypeError):
                session.attention = SDPBackend(torch._fused_sdp_choice(query, *args, **kwargs)).name.lower()
        with session.attention_context():
            return attend(query, *args, **kwargs)

    F.scaled_dot_product_attention = watched


def _watch_reads(session: Session) -> None:
    """Where the loop prints, or waits for the device to read a value."""
    tensor: Any = torch.Tensor
    for name in ("item", "tolist", "__float__"):
        setattr(tensor, name, _watched_read(session, getattr(tensor, name), name))
    builtins.print = _watched_read(session, builtins.print, "print")


def _watched_read(session: Session, read: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(read)
    def watched(*args: Any, **kwargs: Any) -> Any:
        session.saw_read(name)
        return read(*args, **kwargs)

    return watched
