"""Names as profilers show them, of torch 1.13 to 2.12, cuDNN 8 and 9, cuBLAS 12 and 13, Inductor, bitsandbytes."""

from __future__ import annotations

import pytest

from worklog.rules.kernel_names import by_inductor, converts, dequantises, elementwise, layout, matmul

KINDS = (by_inductor, converts, dequantises, elementwise, layout, matmul)
WITH_CAST = "at::native::memory::LoadWithCast<(int)1>, at::native::memory::StoreWithCast<(int)1>"
COPY = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)]"
CAST = (
    f"void at::native::unrolled_elementwise_kernel<{COPY}, std::array<char *, (unsigned long)2>, (int)4, {WITH_CAST}>"
)
STRIDED = (
    f"void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<{COPY}>(x)>(int)"
)
VECTORIZED = "void at::native::vectorized_elementwise_kernel<(int)8, at::native::"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (CAST, {elementwise, converts}),
        (STRIDED, {elementwise}),
        (STRIDED.replace("gpu_kernel_impl_nocast<", "gpu_kernel_impl<"), {elementwise, converts}),
        (
            f"{VECTORIZED}bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)]>",
            {elementwise},
        ),
        (f"{VECTORIZED}(anonymous namespace)::converting_copy_kernel_cuda<float, c10::BFloat16>(x)>", {elementwise}),
        (
            f"{VECTORIZED}float8_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)]>",
            {elementwise},
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>", {elementwise}),
        (
            "void at::native::elementwise_kernel_manual_unroll<128, 8, at::native::gpu_kernel_impl_nocast<x>>",
            {elementwise},
        ),
        (
            "void at::native::vectorized_templated_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            {elementwise},
        ),
        ("void at::native::index_elementwise_kernel<128, 4, x>", set()),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, arange>", set()),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", set()),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>", set()),
        ("triton_poi_fused_add_mul_3", {by_inductor, elementwise}),
        ("triton_poi_fused__to_copy_mul_t_0", {by_inductor, elementwise, converts}),
        ("triton_poi_fused__to_copy_0", {by_inductor, elementwise, converts}),
        ("triton_poi_fused__to_copy_add_mul_silu_7", {by_inductor, elementwise}),
        ("triton_poi_fused_mul_1", {by_inductor, elementwise}),
        ("triton_poi_fused__to_copy_clone_3", {by_inductor, elementwise, converts}),
        ("triton_poi_fused_clone_3", {by_inductor, elementwise, layout}),
        ("triton_poi_fused__unsafe_view_clone_transpose_12", {by_inductor, elementwise, layout}),
        ("triton_poi_fused_add_clone_1", {by_inductor, elementwise}),
        ("triton_poi_fused_convolution_5", {by_inductor, elementwise}),
        ("triton_red_fused_mm_1", {by_inductor}),
        ("triton_tem_fused_mm_4", {by_inductor, matmul}),
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT", {matmul}),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", {matmul}),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x5_tn_align8>(x)", {matmul}),
        ("void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024>", {matmul}),
        ("void internal::gemvx::kernel<int, int, float, float, float, float, 0, 1, 0, 0, 7, 0>", {matmul}),
        ("Cijk_Ailk_Bjlk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x32_MI32x32x1_SN", {matmul}),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", set()),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", set()),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64>>", set()),
        ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>", {layout}),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<float, float, float, true, false>", {layout}),
        ("nchwToFoldedNhwcKernel", {layout}),
        ("void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>", {layout}),
        ("void cudnn::ops::convertTensor_kernel<__half, float, float, (cudnnKernelDataType_t)2>", set()),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", {dequantises}),
        ("void dequantize_weights(int*, __half*)", {dequantises}),
        ("void kdequant_mm_int32_fp16<4, 128, 512>(int*)", set()),
        ("void dequant_gemm_4bit<float>", {matmul}),
        ("void convert_fp8_e4m3_to_bf16_kernel(x)", {dequantises}),
    ],
)
def test_a_kernel_is_what_its_name_says(name: str, kinds: set[object]) -> None:
    assert {kind for kind in KINDS if kind(name)} == kinds
