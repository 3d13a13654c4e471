"""A GPU's coils sing: bursts of memory traffic, one a period of a note, and the power that the GPU drew meanwhile.

    python problems/unet_conv_inference/power_tones.py           # the notes and their periods; plays nothing
    python problems/unet_conv_inference/power_tones.py --play    # plays, and writes the sampled power as CSV

Supply coils move with the current through them (Part IX of the seed, <https://www.vrushankdes.ai>). Whether they can be
heard depends on the board. Half of each period copies memory, half waits: both on the device, in one CUDA graph.
"""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

WARNING = (
    "This switches the GPU's load thousands of times a second, which stresses its power supply for nothing. Use a GPU "
    "that is yours, on which nobody else computes, at your own risk."
)
A4_HZ = 440.0
TWINKLE = "C C G G A A G- F F E E D D C-"
"""A note's name is a quarter; a dash after it doubles it. Melody: traditional ("Ah! vous dirai-je, maman")."""
SEMITONES = {"C": -9, "D": -7, "E": -5, "F": -4, "G": -2, "A": 0, "B": 2}
"""Above A, in equal temperament."""
SAMPLE_S = 0.005
REST_S = 0.15
"""After each note: NVML's power is some tens of milliseconds old, so it shows notes and rests, not periods."""


@dataclass(frozen=True)
class Note:
    name: str
    period_s: float
    periods: int


def notes(melody: str, octaves: int, quarter_s: float) -> Iterator[Note]:
    """Each note of `melody`, `octaves` above the one around A4: its period, and how many of them fill its time."""
    for word in melody.split():
        name = word.rstrip("-")
        hertz = A4_HZ * 2 ** (octaves + SEMITONES[name] / 12)
        yield Note(name, 1 / hertz, round(quarter_s * (1 + word.count("-")) * hertz))


def recorded(note: Note, bytes_per_s: float, cycles_per_s: float) -> Callable[[], None]:
    """The replay of a CUDA graph of one period: a copy for half of it, a spinning thread for the other half."""
    import torch

    source = torch.zeros(int(bytes_per_s * note.period_s / 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.bitwise_not(source, out=target)  # a kernel: in a graph, a plain copy would become a slower copy node
        torch.cuda._sleep(int(cycles_per_s * note.period_s / 2))
    return graph.replay


def rates() -> tuple[float, float]:
    """Bytes a second that one kernel reads (it writes as many), and cycles a second of a spinning thread, measured."""
    import torch

    source = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def seconds(work: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    cycles = 10_000_000
    copying = seconds(lambda: torch.bitwise_not(source, out=target))
    return source.nbytes / copying, cycles / seconds(lambda: torch.cuda._sleep(cycles))


def play(melody: list[Note], file: Path) -> None:
    """Plays the notes one after another; `file` gets a row for each power sample: seconds, note, watts."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    speed = rates()
    replays = {note.name: recorded(note, *speed) for note in melody}
    samples: list[tuple[float, str, float]] = []
    playing, done, began = ["rest"], threading.Event(), time.perf_counter()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            field = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
            samples.append((time.perf_counter() - began, playing[0], field.value.uiVal / 1e3))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for note in melody:
            playing[0] = note.name
            for _ in range(note.periods):
                replays[note.name]()
            torch.cuda.synchronize()
            playing[0] = "rest"
            time.sleep(REST_S)
    finally:
        done.set()
        sampler.join()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(("seconds", "note", "watts"))
        writer.writerows((f"{at:.4f}", name, f"{watts:.1f}") for at, name, watts in samples)


def main(
    really: Annotated[bool, typer.Option("--play", help="Play. Without it nothing runs on the GPU.")] = False,
    octaves: Annotated[int, typer.Option(min=0, max=4, help="Above the octave of A4, at 440 Hz.")] = 2,
    quarter: Annotated[float, typer.Option(min=0.05, max=2, help="Seconds of a quarter note.")] = 0.3,
    out: Annotated[Path, typer.Option(help="The power samples.")] = Path("out/unet_conv_inference/power_tones.csv"),
) -> None:
    """Play a melody by switching the GPU's load. Off by default. Example: power_tones.py --play --octaves 3"""
    melody = list(notes(TWINKLE, octaves, quarter))
    print(f"power_tones.py: {WARNING}", file=sys.stderr)
    for note in melody:
        print(f"{note.name}  {1 / note.period_s:7.1f} Hz  {note.period_s * 1e6:6.1f} us  {note.periods} periods")
    if not really:
        print("Nothing was played; --play plays it.", file=sys.stderr)
        return
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    if not usable:
        print("power_tones.py: --play needs a CUDA GPU and there is none that torch can use here.", file=sys.stderr)
        raise typer.Exit(2)
    play(melody, out)
    print(f"Power samples: {out}")


if __name__ == "__main__":
    typer.run(main)
