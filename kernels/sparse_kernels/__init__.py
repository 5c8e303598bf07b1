"""Operations of a sparse decode step on a paged KV pool: torch and Triton only, usable from any engine.

Each operation has a file of its name, a Triton kernel for GPUs and a torch reference of the same signature.
"""

from ._cluster_launch import prepare_clusters
from .attention_tail import AttentionTail
from .block_gather import block_gather, block_gather_reference
from .block_mass_exact import block_mass_exact, block_mass_exact_reference
from .block_mass_statistics import block_mass_statistics, block_mass_statistics_reference
from .block_mass_thumbnail import block_mass_thumbnail, block_mass_thumbnail_reference
from .block_score_strided import block_score_strided, block_score_strided_reference
from .block_statistics import STATISTICS_OF_KIND, block_statistics, block_statistics_reference
from .block_store import block_store, block_store_reference
from .block_unpack import block_unpack, block_unpack_reference
from .combine import combine, combine_reference
from .coverage_rule import coverage_rule, coverage_rule_reference
from .expected_blocks import ExpectedWorkspace, expected_blocks, expected_blocks_reference
from .fused_top_delta import FusedWorkspace, fused_rows_are_aligned, fused_top_delta, fused_top_delta_reference
from .host_block import pack_blocks, unpack_blocks
from .open_places import open_places, open_places_reference
from .page_summary import page_summary, page_summary_reference
from .page_table import snapshot_page_table, snapshot_page_table_reference
from .prefetch_budget import prefetch_budget, prefetch_budget_reference, prefetch_state
from .prefetch_totals import prefetch_totals, prefetch_totals_reference
from .pseudo_maximum import pseudo_maximum, pseudo_maximum_reference
from .request_totals import request_totals, request_totals_reference
from .rotated_heads import rotated_heads, rotated_heads_reference
from .selection_tap import SelectionTap, TapPoint
from .slot_assign import slot_assign, slot_assign_reference
from .slot_attention import SlotSources, slot_attention, slot_attention_reference
from .slot_claim import slot_claim, slot_claim_reference
from .slot_lookup import slot_lookup, slot_lookup_reference
from .slot_maps import FetchList, SlotMaps
from .sparse_attention import AttentionWorkspace, sparse_attention, sparse_attention_reference
from .split_attention import split_attention, split_attention_reference
from .split_dequantise import split_dequantise, split_dequantise_reference
from .split_keys import SplitKeys
from .split_maximum import split_maximum, split_maximum_reference
from .split_quantise import split_quantise, split_quantise_reference
from .split_store import split_store, split_store_reference
from .step_totals import step_totals
from .stopwatch import stopwatch, stopwatch_reference, stopwatch_state
from .thumbnail import thumbnail, thumbnail_reference, unpack_codes
from .top_delta_rule import top_delta_rule, top_delta_rule_reference
from .top_k_rule import top_k_rule, top_k_rule_reference

__all__ = [
    "STATISTICS_OF_KIND",
    "AttentionTail",
    "AttentionWorkspace",
    "ExpectedWorkspace",
    "FetchList",
    "FusedWorkspace",
    "SelectionTap",
    "SlotMaps",
    "SlotSources",
    "SplitKeys",
    "TapPoint",
    "block_gather",
    "block_gather_reference",
    "block_mass_exact",
    "block_mass_exact_reference",
    "block_mass_statistics",
    "block_mass_statistics_reference",
    "block_mass_thumbnail",
    "block_mass_thumbnail_reference",
    "block_score_strided",
    "block_score_strided_reference",
    "block_statistics",
    "block_statistics_reference",
    "block_store",
    "block_store_reference",
    "block_unpack",
    "block_unpack_reference",
    "combine",
    "combine_reference",
    "coverage_rule",
    "coverage_rule_reference",
    "expected_blocks",
    "expected_blocks_reference",
    "fused_rows_are_aligned",
    "fused_top_delta",
    "fused_top_delta_reference",
    "open_places",
    "open_places_reference",
    "pack_blocks",
    "page_summary",
    "page_summary_reference",
    "prefetch_budget",
    "prefetch_budget_reference",
    "prefetch_state",
    "prefetch_totals",
    "prefetch_totals_reference",
    "prepare_clusters",
    "pseudo_maximum",
    "pseudo_maximum_reference",
    "request_totals",
    "request_totals_reference",
    "rotated_heads",
    "rotated_heads_reference",
    "slot_assign",
    "slot_assign_reference",
    "slot_attention",
    "slot_attention_reference",
    "slot_claim",
    "slot_claim_reference",
    "slot_lookup",
    "slot_lookup_reference",
    "snapshot_page_table",
    "snapshot_page_table_reference",
    "sparse_attention",
    "sparse_attention_reference",
    "split_attention",
    "split_attention_reference",
    "split_dequantise",
    "split_dequantise_reference",
    "split_maximum",
    "split_maximum_reference",
    "split_quantise",
    "split_quantise_reference",
    "split_store",
    "split_store_reference",
    "step_totals",
    "stopwatch",
    "stopwatch_reference",
    "stopwatch_state",
    "thumbnail",
    "thumbnail_reference",
    "top_delta_rule",
    "top_delta_rule_reference",
    "top_k_rule",
    "top_k_rule_reference",
    "unpack_blocks",
    "unpack_codes",
]
