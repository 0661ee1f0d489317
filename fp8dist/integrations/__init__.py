"""Training loops that are not ours: Accelerate, the Trainer of transformers, and Lightning.

Each module imports its framework, so it is imported by name: `from fp8dist.integrations.accelerate import attach`.
"""
