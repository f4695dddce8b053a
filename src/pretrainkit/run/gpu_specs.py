"""Peak FLOP/s and memory of GPU models by name, in upper or lower case."""

from __future__ import annotations

GPUS: dict[str, tuple[float, float | None]] = {
    # Dense bf16 FLOP/s without sparsity, from the vendor's datasheets, and GiB as the driver reports them; None where a
    # model is sold with several memory sizes. The longest name contained in the device's name counts.
    "A100": (312e12, None),
    "A100 40GB": (312e12, 39.6),
    "A100 80GB": (312e12, 79.3),
    "A800": (312e12, None),
    "A800 80GB": (312e12, 79.3),
    "B200": (2250e12, 179.1),
    "GH200": (989e12, None),
    "H100": (989e12, 79.6),
    "H100 NVL": (835e12, 93.6),
    "H100 PCIe": (756e12, 79.6),
    "H200": (989e12, 140.4),
    "H800": (989e12, 79.6),
    "L4": (121e12, 22.5),
    "L40S": (362e12, 45.0),
}


def peak_flops(device_name: str) -> float | None:
    """A GPU's dense bf16 peak in FLOP/s by its name, such as 'NVIDIA H100 80GB HBM3'; None when it isn't known."""
    return _specs(device_name)[0]


def lacks_fp8(device_name: str) -> bool:
    """Whether a GPU of this name is known to have no FP8 products: compute capability below 8.9."""
    return not {"A100", "A800", "V100", "A40", "A30", "A10"}.isdisjoint(_words(device_name))


def memory_gib(device_name: str) -> float | None:
    """A GPU's memory in GiB by its name, such as 'H100' or 'NVIDIA A100-SXM4-40GB'; None when it isn't known."""
    known = _specs(device_name)[1]
    if known is None:
        return None
    sizes = [int(word[:-2]) for word in _words(device_name) if word.endswith("GB") and word[:-2].isdecimal()]
    # Another size is another model, such as the H100 64GB of some sites; vendors count up to 7% more than drivers.
    return known if all(abs(size - known) < 0.1 * known for size in sizes) else None


def _specs(device_name: str) -> tuple[float | None, float | None]:
    words = _words(device_name)
    names = [name for name in GPUS if all(word in words for word in _words(name))]
    return GPUS[max(names, key=len)] if names else (None, None)


def _words(name: str) -> list[str]:
    return name.upper().replace("-", " ").split()
