"""The U-Net's fix, in steps that each stay: `fused_triton`, then `persistent` (CUDA C++, one launch for everything).

Every module of a step has `supported(model, sample)`, the reason why not or None, `build(model)`, a callable as the
model, and `build_sampler(model, coefficients)`, a callable as `unet1d.sample_actions` (noise, condition).
"""
