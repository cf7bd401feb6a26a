"""End-to-end tests: a real vLLM on the CPU behind the real proxy."""
