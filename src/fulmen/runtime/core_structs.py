"""The calls of csrc/fulmen.h, field by field: the one place where Python says how they lie in memory.

``tests/core/test_layout.py`` compares all of this with the header as a C compiler reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

INTEGER, POINTER, DOUBLE = "q", "Q", "d"
Words = tuple[float, ...]  # of a struct, one for each of its 64-bit words


class Struct:
    """A struct of 64-bit words. A field is one of the three above, or a struct itself.

    Attributes:
        words: a function whose keywords are the fields, and that gives the words in their order; a field that is a
            struct is given as its words.
        pack: the same as bytes.
        pack_words: words as bytes; unpack is the way back.
        pointers: which of the words are addresses.
    """

    def __init__(self, name: str, **fields: str | Struct) -> None:
        self.name, self.fields = name, fields
        self.format: str = "".join(kind if isinstance(kind, str) else kind.format for kind in fields.values())
        packer = struct.Struct("=" + self.format)
        self.size = packer.size
        self.pack_words: Callable[[Sequence[float]], bytes] = lambda words: packer.pack(*words)
        self.unpack: Callable[[bytes], Words] = packer.unpack
        self.pointers = [word for word, kind in enumerate(self.format) if kind == POINTER]
        # Written out, as a NamedTuple's constructor is: no faster way checks that every field is given, by name.
        ordered = ", ".join(field if isinstance(kind, str) else f"*{field}" for field, kind in fields.items())
        functions: dict[str, Callable[..., object]] = {}
        exec(
            f"def words(*, {', '.join(fields)}): return ({ordered},)\n"
            f"def pack(*, {', '.join(fields)}): return to_bytes({ordered})",
            {"to_bytes": packer.pack},
            functions,
        )
        # What was executed has no types of its own.
        self.words: Callable[..., Words] = functions["words"]  # type: ignore[assignment]
        self.pack: Callable[..., bytes] = functions["pack"]  # type: ignore[assignment]

    def offsets(self, start: int = 0, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every field and its offset in bytes; fields of structs inside follow as ``outer.inner``."""
        for field, kind in self.fields.items():
            yield prefix + field, start
            if isinstance(kind, Struct):
                yield from kind.offsets(start, f"{prefix}{field}.")
            start += 8 if isinstance(kind, str) else kind.size


TENSOR = Struct("tensor", data=POINTER, dtype=INTEGER, stride_batch=INTEGER, stride_token=INTEGER, stride_head=INTEGER)
STATE = Struct(
    "state",
    data=POINTER,
    dtype=INTEGER,
    stride_batch=INTEGER,
    stride_head=INTEGER,
    stride_row=INTEGER,
    stride_column=INTEGER,
)
HEADER = Struct(
    "header",
    bytes=INTEGER,
    version=INTEGER,
    threads=INTEGER,
    workspace=POINTER,
    workspace_bytes=INTEGER,
    allocate=POINTER,
)
PROBLEM = Struct(
    "problem",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    heads=INTEGER,
    query_heads=INTEGER,
    key_heads=INTEGER,
    value_heads=INTEGER,
    key_size=INTEGER,
    value_size=INTEGER,
    sequences=INTEGER,
    cu_seqlens=POINTER,
    schedule=INTEGER,
    deterministic=INTEGER,
    decay_form=INTEGER,
    decay_v_form=INTEGER,
    scale=DOUBLE,
    q=TENSOR,
    k=TENSOR,
    v=TENSOR,
    log_decay=TENSOR,
    log_decay_v=TENSOR,
    initial_state=STATE,
)
ATTENTION_FORWARD = Struct(
    "attention_forward_call",
    problem=PROBLEM,
    output=TENSOR,
    final_state=STATE,
    value_weights=TENSOR,
    skip=TENSOR,
)
ATTENTION_BACKWARD = Struct(
    "attention_backward_call",
    problem=PROBLEM,
    grad_output=TENSOR,
    grad_state=STATE,
    dq=TENSOR,
    dk=TENSOR,
    dv=TENSOR,
    dlog_decay=TENSOR,
    dlog_decay_v=TENSOR,
    dinitial=STATE,
)
STATES_FORWARD = Struct(
    "states_forward_call",
    problem=PROBLEM,
    chunk_size=INTEGER,
    states=POINTER,
    stride_batch=INTEGER,
    stride_head=INTEGER,
    stride_chunk=INTEGER,
)
STATES_BACKWARD = Struct(
    "states_backward_call",
    problem=PROBLEM,
    chunk_size=INTEGER,
    states=POINTER,
    stride_batch=INTEGER,
    stride_head=INTEGER,
    stride_chunk=INTEGER,
    grad_states=POINTER,
    grad_stride_batch=INTEGER,
    grad_stride_head=INTEGER,
    grad_stride_chunk=INTEGER,
    dk=TENSOR,
    dv=TENSOR,
    dlog_decay=TENSOR,
    dlog_decay_v=TENSOR,
    dinitial=STATE,
)
STEP = Struct(
    "step_call",
    header=HEADER,
    batch=INTEGER,
    heads=INTEGER,
    query_heads=INTEGER,
    key_heads=INTEGER,
    value_heads=INTEGER,
    key_size=INTEGER,
    value_size=INTEGER,
    decay_form=INTEGER,
    decay_v_form=INTEGER,
    scale=DOUBLE,
    q=TENSOR,
    k=TENSOR,
    v=TENSOR,
    log_decay=TENSOR,
    log_decay_v=TENSOR,
    state=STATE,
    output=TENSOR,
)
DELTA_RULE_PROBLEM = Struct("delta_rule_problem", attention=PROBLEM, beta=TENSOR, normalize_qk=INTEGER)
DELTA_RULE_FORWARD = Struct("delta_rule_forward_call", problem=DELTA_RULE_PROBLEM, output=TENSOR, final_state=STATE)
DELTA_RULE_BACKWARD = Struct(
    "delta_rule_backward_call",
    problem=DELTA_RULE_PROBLEM,
    grad_output=TENSOR,
    grad_state=STATE,
    dq=TENSOR,
    dk=TENSOR,
    dv=TENSOR,
    dbeta=TENSOR,
    dlog_decay=TENSOR,
    dinitial=STATE,
)
DELTA_RULE_STEP = Struct("delta_rule_step_call", attention=STEP, beta=TENSOR, normalize_qk=INTEGER)
TPA_DECODE = Struct(
    "tpa_decode_call",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    heads=INTEGER,
    query_rank=INTEGER,
    key_rank=INTEGER,
    value_rank=INTEGER,
    key_size=INTEGER,
    value_size=INTEGER,
    lengths=POINTER,
    split=INTEGER,
    scale=DOUBLE,
    aq=TENSOR,
    ak=TENSOR,
    av=TENSOR,
    bq=TENSOR,
    bk=TENSOR,
    bv=TENSOR,
    output=TENSOR,
)
OUTPUT_GATE_PROBLEM = Struct(
    "output_gate_problem",
    header=HEADER,
    batch=INTEGER,
    queries=INTEGER,
    keys=INTEGER,
    heads=INTEGER,
    key_size=INTEGER,
    value_size=INTEGER,
    deterministic=INTEGER,
    q=TENSOR,
    k=TENSOR,
    v=TENSOR,
    gate=TENSOR,
    kv=STATE,
    qkv=TENSOR,
)
OUTPUT_GATE_FORWARD = Struct("output_gate_forward_call", problem=OUTPUT_GATE_PROBLEM, output=TENSOR)
OUTPUT_GATE_BACKWARD = Struct(
    "output_gate_backward_call",
    problem=OUTPUT_GATE_PROBLEM,
    grad_output=TENSOR,
    dq=TENSOR,
    dk=TENSOR,
    dv=TENSOR,
    dgate=TENSOR,
)
CAUSAL_CONV1D_PROBLEM = Struct(
    "causal_conv1d_problem",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    channels=INTEGER,
    width=INTEGER,
    state_width=INTEGER,
    sequences=INTEGER,
    cu_seqlens=POINTER,
    activation=INTEGER,
    x=TENSOR,
    weight=TENSOR,
    bias=TENSOR,
    initial_state=TENSOR,
)
CAUSAL_CONV1D_FORWARD = Struct(
    "causal_conv1d_forward_call", problem=CAUSAL_CONV1D_PROBLEM, output=TENSOR, final_state=TENSOR
)
CAUSAL_CONV1D_BACKWARD = Struct(
    "causal_conv1d_backward_call",
    problem=CAUSAL_CONV1D_PROBLEM,
    grad_output=TENSOR,
    grad_state=TENSOR,
    dx=TENSOR,
    dinitial=TENSOR,
    dweight=TENSOR,
    dbias=TENSOR,
)
CAUSAL_CONV1D_STEP = Struct(
    "causal_conv1d_step_call",
    header=HEADER,
    batch=INTEGER,
    channels=INTEGER,
    width=INTEGER,
    state_width=INTEGER,
    activation=INTEGER,
    x=TENSOR,
    state=TENSOR,
    weight=TENSOR,
    bias=TENSOR,
    output=TENSOR,
)
RMS_NORM = Struct(
    "rms_norm_call",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    heads=INTEGER,
    size=INTEGER,
    activation=INTEGER,
    gate_first=INTEGER,
    epsilon=DOUBLE,
    x=TENSOR,
    gate=TENSOR,
    weight=TENSOR,
    output=TENSOR,
    rates=POINTER,
)
RMS_NORM_BACKWARD = Struct(
    "rms_norm_backward_call",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    heads=INTEGER,
    size=INTEGER,
    activation=INTEGER,
    gate_first=INTEGER,
    weight_heads=INTEGER,
    x=TENSOR,
    gate=TENSOR,
    weight=TENSOR,
    grad_output=TENSOR,
    dx=TENSOR,
    dgate=TENSOR,
    rates=POINTER,
    dweight=POINTER,
)
LINEAR = Struct(
    "linear_call",
    header=HEADER,
    rows=INTEGER,
    inputs=INTEGER,
    outputs=INTEGER,
    x=TENSOR,
    weight=TENSOR,
    bias=TENSOR,
    output=TENSOR,
)
MATMUL = Struct(
    "matmul_call",
    header=HEADER,
    rows=INTEGER,
    columns=INTEGER,
    depth=INTEGER,
    a=TENSOR,
    b=TENSOR,
    bias=TENSOR,
    output=TENSOR,
)
ELEMENTWISE = Struct(
    "elementwise_call",
    header=HEADER,
    batch=INTEGER,
    tokens=INTEGER,
    channels=INTEGER,
    function=INTEGER,
    scalar=DOUBLE,
    a=TENSOR,
    b=TENSOR,
    output=TENSOR,
)
PATCH = Struct("patch", call=INTEGER, word=INTEGER, tensor=INTEGER, offset=INTEGER)
PROGRAM = Struct("program", bytes=INTEGER, calls=INTEGER, words=POINTER, patches=INTEGER, patch=POINTER)

# The header's constants that Python uses, without their prefix FULMEN_.
_DTYPES = ("FLOAT32", "BFLOAT16", "FLOAT16")
_DECAYS = ("DECAY_NONE", "DECAY_HEAD", "DECAY_TOKEN", "DECAY_CHANNEL")
_SCHEDULES = ("AUTO", "RECURRENT", "LOOP", "PARALLEL", "RECOMPUTE")
_SPLITS = ("SPLIT_AUTO", "SPLIT_BATCH", "SPLIT_HEAD", "SPLIT_SEQUENCE")
_OF_ONE = ("IDENTITY", "SILU", "SIGMOID", "EXP", "SOFTPLUS", "LOG_SIGMOID")
_FUNCTIONS = (*_OF_ONE, "ADD", "MULTIPLY", "DIVIDE", "LARGER", "SMALLER")
_ENUMS = (_DTYPES, _DECAYS, _SCHEDULES, _SPLITS, _FUNCTIONS)
CODES = {name: code for names in _ENUMS for code, name in enumerate(names)}
CODES |= {"VERSION": 10, "OK": 0, "GROWS": -1, "BAD_SEQUENCES": 6, "NO_WORKSPACE": 10}
