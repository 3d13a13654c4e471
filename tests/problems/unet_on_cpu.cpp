// unet_step.cu, its own text, compiled for a CPU.
#include <algorithm>
#include "cuda_on_cpu.h"
#include "../../problems/unet_conv_inference/kernels/unet_step.cu"

// As unet_step_launch, at once and on host memory. Returns 0, or -1 where the blocks wait for each other for ever.
extern "C" int unet_step_emulate(const unet::Args* args, int weights, int shared_bytes, unsigned seed) {
  using namespace unet;
  void (*const kernels[])(Args) = {unet_step<Float32>, unet_step<Half<Bf16>>, unet_step<Half<F16>>};
  return on_cpu::run(BLOCKS, ALL_THREADS, shared_bytes, seed, [&] { kernels[weights](*args); }) ? 0 : -1;
}
extern "C" int unet_step_sizes(int which) { return which ? int(sizeof(unet::Phase)) : int(sizeof(unet::Args)); }
