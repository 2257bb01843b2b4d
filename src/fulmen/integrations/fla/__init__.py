"""flash-linear-attention's functions on Fulmen's operators, with the names, arguments and results of fla-core 0.6.0.

Where code says ``fla.ops``, say ``fulmen.integrations.fla``::

    from fulmen.integrations.fla import chunk_gla
    from fulmen.integrations.fla.kda import chunk_kda

It then runs on a CPU too. FLA itself is not needed. docs/migrating.md says what differs.
"""

from fulmen.integrations.fla.delta_rule import chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule
from fulmen.integrations.fla.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from fulmen.integrations.fla.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from fulmen.integrations.fla.gsa import chunk_gsa, fused_recurrent_gsa
from fulmen.integrations.fla.hgrn import chunk_hgrn, fused_recurrent_hgrn
from fulmen.integrations.fla.kda import chunk_kda, fused_recurrent_kda
from fulmen.integrations.fla.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from fulmen.integrations.fla.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from fulmen.integrations.fla.retention import (
    chunk_retention,
    fused_chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
)
from fulmen.integrations.fla.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from fulmen.integrations.fla.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_gsa",
    "chunk_hgrn",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_hgrn",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]
