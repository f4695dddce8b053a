"""What a scheduler says about the nodes of a job: Slurm's lists, PBS's node file, Grid Engine's host file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class Allocation:
    """The nodes of the job that this process runs in."""

    hosts: tuple[str, ...]
    """In the scheduler's order, each once; the first is the head."""
    slots: tuple[int, ...] = ()
    """Per host, the slots that Grid Engine or PBS gives; empty where it says nothing."""


def read_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that the scheduler's variables describe; None outside a job."""
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        return Allocation(tuple(expand_hosts(nodes)))
    if (path := environment.get("PE_HOSTFILE")) and Path(path).is_file():
        slots = parse_pe_hostfile(Path(path).read_text(encoding="utf-8"))
        return Allocation(tuple(slots), tuple(slots.values()))
    if (path := environment.get("PBS_NODEFILE")) and Path(path).is_file():
        lines = Path(path).read_text(encoding="utf-8").split()
        hosts = tuple(dict.fromkeys(lines))
        return Allocation(hosts, tuple(lines.count(host) for host in hosts))
    return None


def expand_hosts(text: str) -> list[str]:
    """Host names of Slurm's form 'n[01-03,7],login-[1-2]x'. Raises RequestError for another form."""
    hosts = [host for item in _split(text) for host in _expand(item)]
    if not hosts or not all(hosts):
        raise RequestError(f"{text!r} is no list of hosts", needed="Slurm's form, such as n[01-03,7]")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Numbers of Slurm's form '4(x2),3' (tasks or CPUs by node). Raises RequestError for another form."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise RequestError(f"{text!r} is no list of counts", needed="Slurm's form, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def parse_pe_hostfile(text: str) -> dict[str, int]:
    """Host -> slots of Grid Engine's host file: lines 'host slots queue processors', a host per queue it is in."""
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2:
            slots[words[0]] = slots.get(words[0], 0) + int(words[1])
    return slots


def grid_engine_gpus(environment: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of a Grid Engine job that got its GPUs from a resource map: SGE_HGR_gpu='GPU2 GPU3'."""
    for name, value in environment.items():
        if name.startswith("SGE_HGR_") and "gpu" in name.lower():
            numbers = re.findall(r"\d+(?=\s|$)", value)
            return ",".join(numbers) if numbers else None
    return None


def _split(text: str) -> Iterator[str]:
    """Parts between commas that are not in brackets."""
    depth, begin = 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _expand(item: str) -> Iterator[str]:
    """All names of one part, with any number of brackets."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", item)
    if not match:
        if "[" in item or "]" in item:
            raise RequestError(f"{item!r} is no host of a list", needed="Slurm's form, such as n[01-03,7]")
        yield item
        return
    for numbers in match[2].split(","):
        first, _, last = numbers.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise RequestError(f"{item!r} is no host of a list", needed="Slurm's form, such as n[01-03,7]")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(match[3]):
                yield f"{match[1]}{number:0{len(first)}d}{rest}"
