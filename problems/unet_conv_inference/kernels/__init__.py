"""The U-Net's fix, in steps that each stay: `fused_triton`, then `persistent` (CUDA C++, one launch for everything).

Each of the two has `supported(model, sample)`, the reason why not or None, `build(model)`, a callable as the model, and
`build_sampler(model, coefficients)`, a callable as `unet1d.sample_actions` (noise, condition). A CUDA graph can record
all of it.

To read the persistent kernel: plan.py (who computes what), packing.py (how the weights lie), executor.py (both of
them, in NumPy), unet_step.cu. forecast.py says how long it should take, trace.py where its time goes, layers.py whether
each layer is right.
"""
