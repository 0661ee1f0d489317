"""The main job: a byte-level GPT, trained on a pipeline times data-parallel ranks in FP8, BF16 or FP32."""
