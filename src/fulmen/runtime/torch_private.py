"""Names of torch that are not public: all that are used, each with its reason, and a public way where there is one.

What only the lab uses is imported when it is called for: ``import fulmen`` shall stay light.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

Keep = Callable[..., None]


def forward_mode() -> bool:
    """Whether torch.func.jvp or its like is at work. The public way asks every tensor for its tangent; this is asked in
    every call, and takes 50 ns."""
    return getattr(forward_ad, "_current_level", 0) >= 0


# Whether autocast is on for any device. The public way asks for one device, by name; this is asked in every call.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def at_the_end_of_backward(callback: Callable[[], Any]) -> None:
    """Within a backward: call this when all of it has run, as DDP and FSDP wait for their reductions. There is no
    public way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- calls without the dispatcher ------------------------------------------------------------------------------------

PLAIN_TYPES = (Tensor, torch.nn.Parameter)  # no subclass, which may want to see the call


def only_the_kernel_runs(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher, handed these arguments of an op, would run the op's kernel and nothing else: no gradient,
    no autocast, transform, mode, tracer or profiler, no tensor of a kind of its own.

    The dispatcher decides by sets of keys, those of the thread and those of the tensors, and so does this.
    """
    return thread_is_plain() and all(is_plain(x) for x in args if isinstance(x, Tensor))


def thread_is_plain() -> bool:
    """Nothing in this thread wants to see calls or to change them."""
    if _OTHER_KEYS is None or profiler._is_profiler_enabled or forward_mode():
        return False
    if torch._C._is_torch_function_mode_enabled() or any_autocast():
        return False
    return not torch._C._dispatch_tls_local_include_set().raw_repr() & _OTHER_KEYS


def is_plain(x: Tensor) -> bool:
    """An ordinary tensor on the CPU, which has no part in a gradient; for a thread that is plain."""
    if type(x) not in PLAIN_TYPES or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return not torch._C._dispatch_keys(x).raw_repr() & _OTHER_KEYS


def are_plain(tensors: list[Tensor]) -> bool:
    """The same of several, where no gradients are recorded."""
    keys_of = torch._C._dispatch_keys
    return all(type(x) in PLAIN_TYPES and not keys_of(x).raw_repr() & _OTHER_KEYS for x in tensors)


def _other_keys() -> int | None:
    """All keys but those of ordinary tensors and those that every thread has; None where this torch does not tell."""
    try:
        every_thread = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        keys = torch._C._dispatch_keys(torch.empty(0, device="cpu")) | every_thread
        torch._C._dispatch_tls_local_include_set(), torch._C._is_torch_function_mode_enabled()
        return ~keys.raw_repr() if isinstance(profiler._is_profiler_enabled, bool) else None
    except AttributeError:
        return None


_OTHER_KEYS: Any = _other_keys()


# ---- modules whose calls do nothing but what their class says --------------------------------------------------------

_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
# Those of all modules; where this torch does not tell, something that counts as one.
_hooks_of_all = [getattr(torch.nn.modules.module, f"_global{hooks}", True) for hooks in _HOOKS]


def any_hook_of_all_modules() -> bool:
    a, b, c, d = _hooks_of_all
    return bool(a or b or c or d)


def is_as_its_class(own: dict[str, Any]) -> bool:
    """Whether a call of the module whose ``__dict__`` this is is one of its class's forward: it has no hooks, and
    neither a forward of its own, as accelerate gives it, nor a compiled one."""
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or "_compiled_call_impl" in own
    )


# ---- traces ----------------------------------------------------------------------------------------------------------


def dispatch_mode() -> type:
    """The base class of what sees every torch operation in a block. There is no public name for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def eager_dispatch_mode() -> type:
    """The same for blocks that nobody compiles: torch's own wants torch._dynamo, which takes seconds to import."""

    class Eager(dispatch_mode()):  # type: ignore[misc]  # mypy cannot see a base class that is found at run time
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

    return Eager


def leaves_of(tree: Any) -> list[Any]:
    """What nested tuples, lists and dicts hold."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def decomposed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op does that is made of other ops, by these; NotImplemented of another. torch takes ops apart before a
    dispatch mode sees them, but not in inference mode."""
    return op.decompose(*args, **kwargs)


# ---- gradients of custom ops -----------------------------------------------------------------------------------------


def differentiable(
    library: torch.library.Library, name: str, backward: Callable[..., Any], keep: Keep
) -> Callable[..., Any]:
    """The op ``fulmen::{name}`` with a gradient, as a function: ``keep(ctx, inputs, output)`` saves what
    ``backward(ctx, *grads)`` needs.

    torch.library.register_autograd does this without torch.func (grad, vjp, jacrev), and a public
    torch.autograd.Function (:func:`publicly_differentiable`) takes some 50 µs longer for each differentiated call. So
    the op gets a kernel for its Autograd key, made of the pieces that torch.library's own are made of.
    """
    pieces = _pieces_of_autograd()
    op = getattr(torch.ops.fulmen, name).default
    if pieces is None:
        return publicly_differentiable(op, backward, keep)
    below_autograd, keys_below, any_requires_grad, single_level, level_function, enable_forward_mode = pieces

    def below(keyset: Any, *args: Any) -> Any:
        with below_autograd():
            return op.redispatch(keyset & keys_below, *args)

    # The kernel of the Autograd key runs once for each level of torch.func, with the tensors of that level: a function
    # for a single level is all that it takes. The ordinary torch.autograd.Function would look for the levels itself.
    # (mypy cannot see a base class that is found when the module runs.)
    class Gradient(level_function):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keyset = args
            # Off inside of a function, but the levels below may be differentiated too.
            with torch.enable_grad(), enable_forward_mode(True):
                output = below(keyset, *inputs)
            keep(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return *backward(ctx, *grads), None  # for the keyset

    def run(keyset: Any, *args: Any) -> Any:
        if forward_mode():
            refuse_tangents(args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            with single_level():
                return Gradient.apply(*args, keyset)
        return below(keyset, *args)

    library.impl(name, run, "Autograd", with_keyset=True)
    return op


@cache
def _pieces_of_autograd() -> tuple[Any, ...] | None:
    """None where this torch has not got all of them."""
    try:
        from torch import _C
        from torch._functorch import autograd_function
        from torch.autograd.function import _SingleLevelFunction

        return (
            _C._AutoDispatchBelowAutograd,
            _C._after_autograd_keyset,
            _C._any_requires_grad,
            autograd_function.enable_single_level_autograd_function,  # type: ignore[attr-defined]  # torch hides it
            _SingleLevelFunction,
            forward_ad._set_fwd_grad_enabled,
        )
    except (ImportError, AttributeError):
        return None


def publicly_differentiable(op: Callable[..., Any], backward: Callable[..., Any], keep: Keep) -> Callable[..., Any]:
    """The same with public names only. The op itself has no gradient then; the function that is returned has.
    (Compiled, it cannot take one tensor for two inputs.)"""

    class Gradient(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    def run(*args: Any) -> Any:
        refuse_tangents(args)
        return Gradient.apply(*args)

    return run


def not_differentiable(library: torch.library.Library, name: str, why: str) -> Callable[..., Any]:
    """The op as a function that raises, saying why, when somebody differentiates it."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(why)

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    refusing, op = differentiable(library, name, refuse, keep_nothing), getattr(torch.ops.fulmen, name).default
    if refusing is op:
        return op
    # torch.compile does not trace one function's gradient inside of another's, and refuses second derivatives itself.
    return lambda *args: op(*args) if torch.compiler.is_compiling() else refusing(*args)


def refuse_tangents(args: tuple[Any, ...]) -> None:
    """torch would drop the tangents of a custom op's inputs without a word."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args):
        raise RuntimeError("fulmen has no forward-mode derivatives (torch.func.jvp, jacfwd): use reverse mode")


# ---- what the lab uses -----------------------------------------------------------------------------------------------


def fake_tensors() -> Any:
    """A block in which tensors have shapes and strides but no memory. There is no public name for it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree``, nested tuples among it, with every tensor replaced."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, function, tree)


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """The same for tensors that share memory; fake ones have no address."""
    return storage._cdata


def compiled_by_inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What torch.compile's default backend makes of a graph. Its public name does not let the caller count the runs."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    # A backward is run many times on one graph. It may be compiled later than the forward, so this stays set.
    config.donated_buffer = False
    # torch declares more than a callable here; with these arguments it returns one.
    return compile_fx(graph, inputs)  # type: ignore[return-value]


def leave_symbolic(x: Tensor, dim: int) -> None:
    """One compilation shall serve every size of ``dim`` where that is possible."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


def memory_events(profiler: torch.profiler.profile) -> list[Any]:
    """The raw events of a profile, allocations among them, which its public summaries leave out."""
    # There is a profiler inside once the block has ended.
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
