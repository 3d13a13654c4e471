"""The commands that findings end in: they parse, and hold only options that the tools have."""

from __future__ import annotations

import shlex

import pytest

from worklog.capture import ncu, nsys
from worklog.rules import captures

NSYS = {word.partition("=")[0] for word in nsys.profile_argv([], "r", graph_trace="node") if word.startswith("-")} | {
    "--cudabacktrace",
    "--python-backtrace",
    "--cuda-memory-usage",
    "--pytorch",
}
"""Those that the repository's own captures use, and the page of the user guide that rules.captures names."""
NCU = {word.partition("=")[0] for word in ncu.profile_argv([], "r", nvtx_range="x", kernel="k") if word.startswith("-")}


@pytest.mark.parametrize("name", ["PLAIN", "NODES", "OPERATORS", "STACKS", "WAITS", "COPIES"])
def test_a_command_of_nsys(name: str) -> None:
    tool, verb, *words = shlex.split(getattr(captures, name))
    assert (tool, verb) == ("nsys", "profile")
    assert words[-2:] == ["python", "PROGRAM"]
    options = dict(word.split("=", 1) for word in words[:-2])
    assert options.keys() <= NSYS | {"--output"}
    if "--python-backtrace" in options:  # needs a backtrace of CUDA calls, and CPU sampling
        assert "--cudabacktrace" in options
        assert "--sample" not in options


def test_ncu_takes_the_kernels_names_and_nothing_that_a_shell_would() -> None:
    command = captures.traffic(["void at::native::unrolled_elementwise_kernel<x>(int)", "nvjet_sm90_TNT"], "copies")
    words = shlex.split(command)
    assert words[0] == "ncu"
    assert {word.partition("=")[0] for word in words[1:-2]} <= NCU
    assert "--kernel-name=regex:^(nvjet_sm90_TNT|unrolled_elementwise_kernel)$" in words
    hostile = captures.traffic(["void x'; rm -rf / #(int)"], "copies")
    assert "rm" not in hostile
    assert "--kernel-name" not in hostile
    assert shlex.split(hostile)[-2:] == ["python", "PROGRAM"]
