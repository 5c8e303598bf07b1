"""The variable that asks for checks of what a server keeps."""

SELF_CHECK_VARIABLE = "SGLANG_SPARSE_DECODE_SELF_CHECK"
"""If set to 1, each read of `/server_info` recomputes the summaries of all live pages and reports differences. A server
with split keys then keeps all keys as they are too."""
