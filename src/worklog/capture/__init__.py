"""Captures by torch.profiler, nsys, ncu and the allocator's history.

A builder (`profile_argv`, `export_argv`) returns an argument list and does nothing else; a runner runs one and turns
each way to fail into one sentence.
"""
