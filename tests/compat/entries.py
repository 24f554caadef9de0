"""Kernels that a program has and does not make by itself when it is run without arguments, or makes only with what
the values of tensors say: a call for each, as its author makes it elsewhere, in the program's own names."""

from __future__ import annotations

_NSA = "dim=64, is_causal=True, block_size=32, groups=16, selected_blocks=4, batch=1, seq_len=256, heads=16"
_VARLEN = "2, 2048, 2048, 1024, 32, 1024, 192, 128, False, 128, 32, groups=16"

#: program → expressions
ENTRIES: dict[str, tuple[str, ...]] = {
    "analyze/example_conv_analyze.py": (
        "kernel.compile(N=4, C=64, H=32, W=32, F=64, K=3, S=1, D=1, P=1, block_M=64, block_N=64, block_K=32, "
        "num_stages=3, threads=128)",
    ),
    "analyze/example_gemm_analyze.py": (
        "kernel.compile(block_M=128, block_N=128, block_K=32, num_stages=3, thread_num=128, "
        "enable_rasteration=True)",
    ),
    "deepseek_nsa/example_tilelang_nsa_bwd.py": (
        f"tilelang_kernel_fwd.compile({_NSA})",
        f"tilelang_kernel_bwd_dkv.compile({_NSA})",
        f"tilelang_kernel_bwd_dqkv.compile({_NSA})",
        "tilelang_kernel_preprocess.compile(batch=1, seq_len=256, heads=16, dim=64)",
        "tilelang_kernel_block_mask.compile(block_size=32, batch=1, seq_len=256, heads=1, selected_blocks=4)",
    ),
    "deepseek_nsa/example_tilelang_nsa_fwd_varlen.py": (
        "native_sparse_attention_varlen.compile(batch=2, dim=64, is_causal=True, block_size=32, groups=16, "
        "selected_blocks=4, heads=16, c_seq_len=256)",
    ),
    "deepseek_v32/fp8_lighting_indexer.py": (
        "mqa_attn_return_logits.compile(heads=64, index_dim=128)",
        "clean_logits_.compile()",
    ),
    "deepseek_v32/inference/kernel.py": (
        "act_quant_kernel(1024)",
        "act_quant_kernel(1024, round_scale=True)",
        "fp8_gemm_kernel(1024, 1024)",
        "fp8_index_kernel(64, 128)",
    ),
    "dequantize_gemm/example_dequant_gemm_fp4_hopper.py": (
        "test_convert(256, 256, 64, 64, T.float16)",
        "matmul(256, 256, 256, T.float16, T.float16, T.float32, block_M=64, block_N=64, block_K=64, split=2)",
    ),
    "dequantize_gemm/example_dequant_gemm_w4a8.py": ("_convert_test(256, 256, 64, 64, T.int8)",),
    "dsa_sparse_finetune/indexer_bwd.py": ("tl_indexer_bwd_impl.compile(heads=64, dim=128, topk=256)",),
    "dsa_sparse_finetune/sparse_mla_topk_reducesum.py": (
        "tl_sparse_mla_topk_reducesum_impl.compile(heads=64, dim=512, tail_dim=64, topk=256)",
    ),
    "flash_attention/example_gqa_bwd.py": (
        "flashattn_bwd_split(1, 32, 256, 192, 128, False, 128, 32, groups=16)",
    ),
    "flash_attention/example_gqa_bwd_tma_reduce.py": (
        "flashattn_bwd_split_novarlen(1, 32, 256, 192, 128, False, 128, 32, groups=16)",
        "flashattn_bwd_postprocess(1, 32, 2, 256, 192, 128)",
    ),
    "flash_attention/example_gqa_bwd_tma_reduce_varlen.py": (
        "flashattn_bwd_preprocess(2, 32, 2048, 1024, 1024, 128)",
        "flashattn_bwd_postprocess(2048, 2048, 32, 2, 192, 128)",
        f"flashattn_bwd_atomic_add({_VARLEN})",
        f"flashattn_bwd_split({_VARLEN})",
    ),
    "flash_decoding/example_gqa_decode_varlen_logits.py": (
        "flashattn(4, 16, 8, 512, 1024, 128, False)",
        "flashattn(4, 16, 8, 512, 1024, 128, True)",
    ),
    "linear_attention/example_linear_attn_bwd.py": ("tl_fused_chunk_bwd_kernel(1, 512, 4, 64, 64)",),
    "linear_attention/example_linear_attn_fwd.py": ("tl_fused_chunk_fwd_kernel(1, 512, 4, 64, 64)",),
    "gemm/example_gemm_advanced_autotune.py": (
        'get_best_config(1024, 1024, 1024, False, "event", "auto", True, False, 20)',
    ),
    "gemm/example_gemm_autotune.py": ("get_best_config(1024, 1024, 1024)",),
    "gemm/example_gemm_autotune_early_stop.py": ("make_kernel()(**get_configs()[0])",),
    "gemm/example_gemm_autotune_pass_configs.py": ("get_best_config(1024, 1024, 1024)",),
    "minference/example_vertical_slash_sparse_attn.py": (
        "_tl_vs_sparse_flashattn(1, 1, 4096, 64, 1000, 200)",
    ),
    "norm/layernorm.py": ("_layernorm_fwd(1024, 1024)", "_layernorm_bwd(1024, 1024)"),
    "norm/rms_norm.py": ("rms_norm_splitk.compile(M=1024, N=1024, blk_m=1, blk_k=512)",),
}
