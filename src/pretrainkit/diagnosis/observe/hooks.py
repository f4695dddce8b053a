"""The patches in torch through which a training program is watched and changed, all made before it has begun.

Each costs one Python call per step, batch or collective; none is called per operation or per layer.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.nn.functional as F
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pretrainkit.diagnosis.observe import phases
from pretrainkit.diagnosis.observe.sampler import sampled_worker_loop

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base", "barrier"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object"),
    *("broadcast_object_list", "monitored_barrier"),
)
LATE = (
    ("megatron.core.dist_checkpointing", "save", phases.CHECKPOINT),
    ("pretrainkit.engine.callbacks.checkpoints", "Checkpoints._save", phases.CHECKPOINT),
    ("pretrainkit.engine.callbacks.recording", "Recording.on_train_batch_end", phases.LOGGING),
    ("safetensors.torch", "save_file", phases.CHECKPOINT),
    ("torch.distributed.checkpoint", "save", phases.CHECKPOINT),
    ("torch.utils.tensorboard", "SummaryWriter.add_scalar", phases.LOGGING),
    ("transformers.trainer", "Trainer._save_checkpoint", phases.CHECKPOINT),
    ("transformers.trainer", "Trainer.log", phases.LOGGING),
    ("wandb", "log", phases.LOGGING),
)
"""Functions of packages that are imported later, and the phase that their time belongs to."""


def install(session: Session) -> None:
    """Patch torch in this process, for good."""
    _watch_loaders(session)
    _watch_backward(session)
    _watch_optimizers(session)
    _watch_modules(session)
    _watch_attention(session)
    _watch_reads(session)
    if torch.distributed.is_available():
        for name in COLLECTIVES:
            if hasattr(torch.distributed, name):
                _time(session, torch.distributed, name, phases.COMMUNICATION)
        work = getattr(torch._C._distributed_c10d, "Work", None)
        if work is not None:
            _time(session, work, "wait", phases.COMMUNICATION)
    _time(session, torch, "save", phases.CHECKPOINT)


def install_late(session: Session) -> None:
    """Patch what the program has imported by the time it trains."""
    for module_name, name, phase in LATE:
        if module_name in sys.modules:
            owner: Any = importlib.import_module(module_name)
            *outer, attribute = name.split(".")
            for part in outer:
                owner = getattr(owner, part, None)
            if hasattr(owner, attribute) and not hasattr(getattr(owner, attribute), "is_timed"):
                _time(session, owner, attribute, phase)


def _time(session: Session, owner: Any, name: str, phase: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with session.clock.phase(phase):
            return original(*args, **kwargs)

    timed.is_timed = True  # type: ignore[attr-defined]
    try:
        setattr(owner, name, timed)
    except (AttributeError, TypeError):
        session.notes.append(f"{name} can't be timed here")


def _watch_loaders(session: Session) -> None:
    loader_class: Any = torch.utils.data.DataLoader
    worker: Any = torch.utils.data._utils.worker
    make_iterator = loader_class.__iter__

    def iterate(loader: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return make_iterator(loader)
        return session.stream(loader, functools.partial(make_iterator, loader))

    loader_class.__iter__ = iterate
    functools.update_wrapper(sampled_worker_loop, worker._worker_loop, assigned=(), updated=())
    worker._worker_loop = sampled_worker_loop


class _Engine:
    """The autograd engine, its backward passes timed: everything that runs one comes through here."""

    def __init__(self, session: Session, engine: Any) -> None:
        self._session, self._engine = session, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        session.before_backward()
        with session.clock.phase(phases.BACKWARD):
            return self._engine.run_backward(*args, **kwargs)


def _watch_backward(session: Session) -> None:
    variable: Any = torch.autograd.Variable
    variable._execution_engine = _Engine(session, variable._execution_engine)


def _watch_optimizers(session: Session) -> None:
    clock = session.clock

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        session.before_optimizer(optimizer)
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
        if not any(known is module for known in session.seen_modules):
            session.seen_modules.append(module)
        try:
            with session.clock.phase(phases.FORWARD):
                return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def narrow() -> None:
        module_class.__call__ = call
        for module in session.seen_modules:
            module.forward = _watched_forward(session, module.forward)

    module_class.__call__ = watched
    session.stop_looking_for_modules = narrow


def _watched_forward(session: Session, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with session.clock.phase(phases.FORWARD):
            return forward(*args, **kwargs)

    return watched


def _watch_attention(session: Session) -> None:
    attend = F.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return attend(query, key, value, *args, **kwargs)
        if not session.loop.attention:
            mask = args[0] if args else kwargs.get("attn_mask")
            session.loop.attention.update(
                query=list(query.shape),
                key=list(key.shape),
                dtype=str(query.dtype).removeprefix("torch."),
                has_mask=mask is not None,
                is_causal=bool(kwargs.get("is_causal", args[2] if len(args) > 2 else False)),
                dropout=float(kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)),
            )
        with session.attention_context():
            return attend(query, key, value, *args, **kwargs)

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
        is_between = session.is_watching_reads and session.clock.current in (phases.OTHER, phases.LOGGING)
        if is_between and session.is_main_thread():
            session.loop.saw_read(name)
        return read(*args, **kwargs)

    return watched
